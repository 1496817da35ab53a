"""Labels in tables, in YAML, and in lines with more than the label."""

from pathlib import Path

import pytest

from model.checkpoint.labels import read_labels
from model.errors import CheckpointError
from tests.support.label_files import ENCODINGS, LABELS, assert_read, assert_refused

FORMS = {
    "table.txt": "0,cat\n1,dog\n2,red fox\n",
    "teachable.txt": "0 cat\n1 dog\n2 red fox\n",
    "numbered.txt": "1: dog\n0: cat\n2: red fox\n",
    "python.txt": "{0: 'cat', 1: 'dog',\n 2: 'red fox'}",
    "headed.csv": "index,label\n0,cat\n1,dog\n2,red fox\n",
    "turned.csv": 'label,index\n"dog",1\n"cat",0\n"red fox",2\n',
    "bare.csv": "0,cat\n1,dog\n2,red fox\n",
    "semicolons.csv": "id;class name\n0;cat\n1;dog\n2;red fox\n",
    "excel.csv": "sep=;\nid;name\n0;cat\n1;dog\n2;red fox\n",
    "pipes.csv": "id|label\n0|cat\n1|dog\n2|red fox\n",
    "tabs.tsv": "cat\t0\ndog\t1\nred fox\t2\n",
    "described.csv": "class_id,name,supercategory\n0,cat,pet\n1,dog,pet\n2,red fox,wild\n",
    "named.csv": "index,wnid,label\n0,n00,cat\n1,n01,dog\n2,n02,red fox\n",
    "bare-ids.csv": "0,n01,cat\n1,n02,dog\n2,n03,red fox\n",
    "python.json": "{0: 'cat', 1: 'dog', 2: 'red fox'}",
    "column.csv": "label\ncat\ndog\nred fox\n",
    "data.yaml": "nc: 3\nnames: ['cat', 'dog', 'red fox']\n",
    "names.yml": "path: ../x\nnames:\n  0: cat\n  1: dog\n  2: red fox\n",
    "plain.yaml": "- cat\n- dog\n- red fox\n",
    "after.txt": "cat,0\nred fox,2\ndog,1\n",
    "after-tab.txt": "cat\t0\nred fox\t2\ndog\t1\n",
    "after-space.txt": "red fox 2\ncat 0\ndog 1\n",
    "after-equals.txt": "red fox=2\ncat=0\ndog=1\n",
    "after-dash.txt": "red fox - 2\ncat - 0\ndog - 1\n",
    "after-colon.txt": "red fox : 2\ncat : 0\ndog : 1\n",
    "after-brackets.txt": "red fox (2)\ncat (0)\ndog (1)\n",
    "bracket.txt": "2) red fox\n0) cat\n1) dog\n",
    "brackets.txt": "(2) red fox\n(0) cat\n(1) dog\n",
    "pipe.txt": "2|red fox\n0|cat\n1|dog\n",
    "dash.txt": "2 - red fox\n0 - cat\n1 - dog\n",
    "equals.txt": "2 = red fox\n0 = cat\n1 = dog\n",
    "arrow.txt": "2 -> red fox\n0 -> cat\n1 => dog\n",
    "numbered-quotes.txt": "2: 'red fox',\n0: 'cat',\n1: 'dog',\n",
    "numbered-synsets.txt": "2 n01484850 red fox\n0 n01440764 cat\n1 n01443537 dog\n",
    "dots.txt": "0. cat\n1. dog\n2. red fox\n",
    "quoted.txt": '"cat"\n"dog"\n"red fox"\n',
    "commas.txt": "cat,\ndog,\nred fox,\n",
    "synset_words.txt": "n01440764 cat\nn01443537 dog\nn01484850 red fox\n",
    "clsloc.txt": "n02119789 1 dog\nn02100735 0 cat\nn02110185 2 red fox\n",
    "bullets.txt": "- cat\n- dog\n- red fox\n",
    "semicolons.txt": "cat;\ndog;\nred fox;\n",
    "label_is_index.csv": "name,label\ncat,0\nred fox,2\ndog,1\n",
    "of_pandas.csv": ",name,count\n0,cat,7\n1,dog,5\n2,red fox,5\n",
    "foreign_header.csv": "key,value\n1,dog\n0,cat\n2,red fox\n",
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", FORMS)
def test_labels_are_read_in_each_form(name: str, encoding: str, tmp_path: Path) -> None:
    assert_read(tmp_path / name, FORMS[name], encoding)


@pytest.mark.parametrize(
    "text",
    [
        "0:cat,1:dog,2:red fox",
        "red fox=2,cat=0,dog=1",
        "{0: 'cat', 1: 'dog', 2: 'red fox'}",
        "['cat', 'dog', 'red fox']",
        "('cat', 'dog', 'red fox')",
    ],
)
def test_a_setting_is_read_as_lines_of_a_file(text: str) -> None:
    assert read_labels(text, 3) == LABELS


def test_quotes_keep_numbers_in_a_setting() -> None:
    with pytest.raises(CheckpointError, match=r"count from 0; .*write each label in quotes"):
        read_labels("1:cat,2:dog", 2)
    assert read_labels('"1:cat","2:dog"', 2) == ("1:cat", "2:dog")


def test_files_of_the_field_are_read(shared: Path) -> None:
    names = (
        "class_to_idx.json",
        "data.yaml",
        "id2label.json",
        "imagenet_class_index.json",
        "labels.csv",
    )
    for name in (*names, "labels_bom.txt"):
        assert read_labels(str(shared / "data" / "field" / name), 3) == LABELS, name


@pytest.mark.parametrize(
    "labels",
    [
        ("2 stroke", "4 cylinders"),
        ("car 0", "car 1"),
        ("Boeing 737", "Airbus 320"),
        ("ratio 16:9", "ratio 4:3"),
        ("2-piece", "4-door"),
        ("1.5 ton", "0.5 ton"),
    ],
)
def test_numbers_of_names_stay_in_labels(labels: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("\n".join(labels))
    assert read_labels(str(tmp_path / "labels.txt"), 2) == labels


def test_index_is_the_number_that_counts_lines(tmp_path: Path) -> None:
    (tmp_path / "phones.txt").write_text("2 stroke 1\n4 cylinders 0\n")
    assert read_labels(str(tmp_path / "phones.txt"), 2) == ("4 cylinders", "2 stroke")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 cat\n1 dog\n10 bird", "no label for index 2: its 3 labels have the indices 0 to 10"),
        ("0 cat\n1 dog\n1 bird", "line 3: index 1 is 'dog' and 'bird'"),
        ("cat 0\ndog 1\nbird 10", "no label for index 2"),
        ("cat\t0\ndog\t1\nbird\t10", "no label for index 2"),
        ("cat\t5\ndog\t6\nbird\t7", "no label for index 0"),
        ("cat 1\ndog 2\nbird 3", "no label for index 0.*; count from 0"),
        ("1 euro\n2 euro\n5 cent", "no label for index 0"),
    ],
)
def test_gaps_of_indices_in_lines_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text(text)
    with pytest.raises(CheckpointError, match=f"{message}.*write each label in quotes"):
        read_labels(str(file), 3)
    lines = text.splitlines()
    file.write_text("\n".join(f'"{line}"' for line in lines))
    assert read_labels(str(file), 3) == tuple(lines)


def test_words_of_a_form_stay_labels(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("names: [no, on, 1.0, ~]\n")
    assert read_labels(str(tmp_path / "data.yaml"), 4) == ("no", "on", "1.0", "~")
    (tmp_path / "digits.csv").write_text("index,label\n0,1\n1,0\n")
    assert read_labels(str(tmp_path / "digits.csv"), 2) == ("1", "0")
    (tmp_path / "engines.txt").write_text("2 stroke\n4 stroke\n")
    assert read_labels(str(tmp_path / "engines.txt"), 2) == ("2 stroke", "4 stroke")
    (tmp_path / "types.txt").write_text("type 1\ntype 2\n")
    assert read_labels(str(tmp_path / "types.txt"), 2) == ("type 1", "type 2")
    (tmp_path / "synonyms.txt").write_text("tench, Tinca tinca\n7,5 ton truck\n")
    assert read_labels(str(tmp_path / "synonyms.txt"), 2) == ("tench, Tinca tinca", "7,5 ton truck")


REFUSED = {
    "gap.csv": (
        "index,label\n0,cat\n2,dog\n",
        "no label for index 1: its 2 labels have the indices 0 to 2",
    ),
    "twice.csv": ("index,label\n0,cat\n0,dog\n", "line 3: index 0 is 'cat' and 'dog'"),
    "from-one.csv": ("1,cat\n2,dog\n", "no label for index 0.*count from 0"),
    "from-one.txt": ("1 cat\n2 dog\n", "no label for index 0.*count from 0"),
    "no-index.csv": (
        "n01440764,tench\nn01443537,goldfish\n",
        "do not tell which are index and label",
    ),
    "cells.csv": ("index,label\n0,cat\n1,dog,x\n", "line 3 has 3 cells, expected 2"),
    "unlabelled.csv": (
        "index,label\n0,cat\n1,\n",
        "line 3: '': a label must be text that is not empty",
    ),
    "hole.csv": ("index,label\n0,cat\n\n1,dog\n", "line 3 has 0 cells, expected 2"),
    "broken.yaml": ("names: [cat, dog\n", "not YAML"),
    "twice.yaml": ("names:\n  0: cat\n  0: dog\n", "'0' is there twice"),
    "circle.yaml": ("names: &a [*a, *a]\n", "line 1: write the values out instead of an alias"),
    "unnamed.yaml": ("nc: 3\n", "no label for index 0"),
    "rows.jsonl": ('{"id": 0, "label": "cat"}\n', "a file .jsonl is not read as labels"),
    "bare-groups.csv": (
        "0,cat,pet\n1,fox,wild\n",
        "2 columns can be the label: add a first line that names the columns",
    ),
    "classes.npy": ("cat", "an object of Python or NumPy is not read as labels: save it as text"),
    "header.csv": ("index,label\n", "a header without labels"),
    "counted.yaml": (
        "nc: 4\nnames: [cat, dog]\n",
        "nc is 4, but there are 2 labels: correct the wrong one",
    ),
    "counted.json": ('{"num_classes": 3, "classes": ["cat", "dog"]}', "num_classes is 3, but"),
    "counted-map.json": ('{"nc": 1, "mine": {"cat": 0, "dog": 1}}', "nc is 1, but"),
    "listing.csv": (
        "filename,label\na.jpg,0\nb.jpg,1\n",
        "'filename' lists pictures, not labels: give a table with one line for each class",
    ),
    "paths.csv": ("id,Image Path\n0,a.jpg\n1,b.jpg\n", "'image_path' lists pictures"),
    "split.csv": ("img,label,split\na.jpg,0,x\nb.jpg,1,x\n", "'img' lists pictures"),
    "bare-listing.csv": ("a.jpg,0\nb.jpg,0\n", "line 1: 'a.jpg' is a picture, not a label: give"),
    "bare-listing.txt": ("a.jpg 0\nb.jpg 1\n", "line 1: 'a.jpg' is a picture"),
    "one-column.csv": ("filename\na.PNG\n", "line 2: 'a.PNG' is a picture"),
    "counts.csv": (
        "label,count\ncat,1\ndog,0\n",
        "'count' need not be the index of the classes: if it is, call it index; else give one",
    ),
    "images.csv": ("label,Number of images\ncat,1\ndog,0\n", "'number_of_images' need not be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_form_leaves_open_is_refused(name: str, tmp_path: Path) -> None:
    assert_refused(tmp_path / name, *REFUSED[name])


def test_hidden_characters_in_tables_are_refused(tmp_path: Path) -> None:
    text = "index,label\n0,cat\n1,cat\u200b\n"
    assert_refused(tmp_path / "labels.csv", text, r"has U\+200B, which does not print: remove it")
