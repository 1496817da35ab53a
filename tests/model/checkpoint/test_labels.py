"""Labels are read in every form in which people have them, or refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint.labels import read_labels
from model.checkpoint.local_files import read_json
from model.errors import CheckpointError

RIGHT = ("cat", "dog", "red fox")
FORMS: dict[str, str] = {
    "lines.txt": "cat\ndog\nred fox\n",
    "spaces.txt": "\n  cat\r\ndog \r\n\r\nred fox\r\n\r\n",
    "list.json": '["cat", "dog", "red fox"]',
    "id2label.json": '{"id2label": {"0": "cat", "1": "dog", "2": "red fox"}}',
    "index.json": '{"2": "red fox", "0": "cat", "1": "dog"}',
    "keras.json": '{"0": ["n00", "cat"], "1": ["n01", "dog"], "2": ["n02", "red fox"]}',
    "class_to_idx.json": '{"cat": 0, "dog": 1, "red fox": 2}',
    "label2id.json": '{"label2id": {"red fox": 2, "cat": 0, "dog": 1}}',
    "coco.json": '{"categories": [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}, {"id": 2, "name": "red fox"}]}',
    "json.txt": '["cat", "dog", "red fox"]',
    "header.csv": "index,label\n0,cat\n1,dog\n2,red fox\n",
    "reversed.csv": "class_name,class_id\nred fox,2\ncat,0\ndog,1\n",
    "bare.csv": '0,cat\n1,"dog"\n2,red fox\n',
    "semicolon.csv": "id;name\n0;cat\n1;dog\n2;red fox\n",
    "table.tsv": "0\tcat\n1\tdog\n2\tred fox\n",
    "more.csv": "index,wnid,label\n0,n00,cat\n1,n01,dog\n2,n02,red fox\n",
    "one.csv": "label\ncat\ndog\nred fox\n",
    "table.txt": "0,cat\n1,dog\n2,red fox\n",
    "data.yaml": "nc: 3\nnames: ['cat', 'dog', 'red fox']\n",
    "names.yml": "path: x\nnames:\n  0: cat\n  1: dog\n  2: red fox\n",
}
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", FORMS)
def test_a_file_is_read_in_any_form(name: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FORMS[name].encode(encoding))
    assert read_labels(str(path), 3) == RIGHT
    with pytest.raises(CheckpointError, match="3 labels for 4 classes"):
        read_labels(str(path), 4)


@pytest.mark.parametrize("text", ["cat,dog,red fox", 'cat, dog, "red fox"', '["cat", "dog", "red fox"]'])
def test_names_are_read_where_a_file_is(text: str) -> None:
    assert read_labels(text, 3) == RIGHT


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gap.csv", "0,cat\n2,dog\n", "class 1 has none"),
        ("twice.csv", "0,cat\n0,dog\n", "class 0 has two labels: 'cat' and 'dog'"),
        ("gap.json", '{"0": "cat", "2": "dog"}', "class 1 has none"),
        ("number.json", '{"0": 7.5, "1": "dog"}', "a label must be text"),
        ("key.json", '{"a": "cat", "b": "dog"}', "expected a class index and its label"),
        ("other.json", "[1, 2]", "no labels that are known: expected a list, an object"),
        ("damaged.json", '["cat", ', "not JSON"),
        ("damaged.yaml", "names: [cat, ", "not YAML"),
        ("nothing.txt", "", "0 labels"),
    ],
)
def test_another_form_is_refused_with_the_reason(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_labels(str(path), None)


def test_what_is_neither_a_file_nor_names_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'cats.txt': neither a file, nor names like cat,dog, nor one of"):
        read_labels("cats.txt", 3)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_may_have_a_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(json.dumps({"a": 1}).encode(encoding))
    assert read_json(path, "config.json") == {"a": 1}


@pytest.mark.shared
def test_files_of_the_field_are_read_as_they_say(shared: Path) -> None:
    names: list[Any] = ["labels_bom.txt", "imagenet_class_index.json", "class_to_idx.json", "id2label.json"]
    for name in (*names, "labels.csv", "data.yaml"):
        assert read_labels(str(shared / "data/field" / name), 3) == RIGHT, name
