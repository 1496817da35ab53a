"""Labels in the forms of the core: lines, JSON, and the setting itself."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from model.checkpoint import label_forms
from model.checkpoint.labels import read_labels
from model.errors import CheckpointError, ExtensionError
from model.extension import Extension
from tests.support.label_files import ENCODINGS, LABELS, assert_read, assert_refused

FORMS = {
    "text.txt": "cat\ndog\nred fox\n",
    "spaces.txt": "  cat\ndog  \nred fox\n\n\n",
    "json.txt": '["cat", "dog", "red fox"]',
    "old-mac.txt": "cat\rdog\rred fox",
    "one-line.txt": 'cat,dog,"red fox"\n',
    "list.json": '["cat", "dog", "red fox"]',
    "indexed.json": '{"2": "red fox", "0": "cat", "1": "dog"}',
    "keras.json": '{"0": ["n00", "cat"], "1": ["n01", "dog"], "2": ["n02", "red fox"]}',
    "class_to_idx.json": '{"red fox": 2, "cat": 0, "dog": 1}',
    "config.json": '{"id2label": {"0": "cat", "1": "dog", "2": "red fox"}, '
    '"label2id": {"LABEL_0": 0}, "size": 3}',
    "label2id.json": '{"label2id": {"cat": "0", "dog": "1", "red fox": "2"}}',
    "native.json": '{"format": "vitserve", "labels": ["cat", "dog", "red fox"]}',
    "coco.json": '{"categories": [{"id": 1, "name": "dog"}, {"id": 0, "name": "cat"}, '
    '{"id": 2, "name": "red fox"}]}',
    "objects.json": '{"1": {"name": "dog"}, "0": {"name": "cat"}, '
    '"2": {"id": 2, "name": "red fox"}}',
    "pairs.json": '[["n00", "cat"], ["n01", "dog"], ["n02", "red fox"]]',
    "indexed-pairs.json": '[[2, "red fox"], [0, "cat"], [1, "dog"]]',
    "turned-pairs.json": '[["red fox", 2], ["cat", 0], ["dog", 1]]',
    "nested.json": '{"model": {"label_map": {"0": "cat", "1": "dog", "2": "red fox"}}}',
    "dataset_info.json": '{"features": {"label": {"names": ["cat", "dog", "red fox"]}}}',
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", FORMS)
def test_labels_are_read_in_each_form(name: str, encoding: str, tmp_path: Path) -> None:
    assert_read(tmp_path / name, FORMS[name], encoding)


@pytest.mark.parametrize(
    "text", ['cat,dog,"red fox"', '["cat", "dog", "red fox"]', '{"cat":0,"dog":1,"red fox":2}']
)
def test_labels_may_stand_in_the_setting(text: str) -> None:
    assert read_labels(text, 3) == LABELS


def test_a_tuple_of_python_may_be_a_setting() -> None:
    assert read_labels("(cat, dog, red fox)", 3) == LABELS


def test_pictures_in_the_setting_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"VIT_LABELS: .*'a.jpg' is a picture, not a label"):
        read_labels("a.jpg,b.jpg", 2)


def test_descriptions_replace_names_of_timm(tmp_path: Path) -> None:
    text = '{"label_names": ["n1", "dog"], "label_descriptions": {"n1": "cat"}, "num_classes": 2}'
    (tmp_path / "config.json").write_text(text)
    assert read_labels(str(tmp_path / "config.json"), 2) == ("cat", "dog")


@pytest.mark.parametrize("name", ["a.txt", "a.json"])
def test_hidden_characters_in_files_are_refused(name: str, tmp_path: Path) -> None:
    texts = {
        "a.txt": "cat\ncat\u200b\n",
        "a.json": '["cat", "cat\\u200b"]',
    }
    assert_refused(tmp_path / name, texts[name], r"has U\+200B, which does not print: remove it")


def test_labels_without_file_are_refused() -> None:
    for name in ("cats.txt", "cats, dogs.csv", "cats"):
        with pytest.raises(
            CheckpointError, match=r"neither a file, nor names like cat,dog, nor .* as \[\"cats"
        ):
            read_labels(name, 2)


def test_numbers_in_json_stay_labels(tmp_path: Path) -> None:
    (tmp_path / "digits.json").write_text('{"1": 0, "0": 1}')
    assert read_labels(str(tmp_path / "digits.json"), 2) == ("1", "0")


REFUSED = {
    "gap.json": ('{"0": "cat", "2": "dog"}', "no label for index 1: its 2 labels have the"),
    "twice.json": ('{"0": "cat", "0": "dog"}', "'0' is there twice: 'cat' and 'dog'"),
    "shared.json": ('{"cat": 0, "dog": 0}', "index 0 is 'cat' and 'dog'; give each index once"),
    "contradiction.json": (
        '{"id2label": {"0": "cat", "1": "dog"}, "label2id": {"cat": 1, "dog": 0}}',
        "label2id has 'cat' at 1, where id2label has 'dog'",
    ),
    "other.json": (
        '{"a": {"b": 1}, "c": {"d": 1}}',
        "neither from index to label nor from label to index",
    ),
    "empty-list.json": ("[]", "holds no labels"),
    "numbers.json": ("[1, 2]", "entry 0: 1: a label must be text"),
    "damaged.json": ('["cat", ', "not JSON"),
    "key.json": ('{"a": "cat", "b": "dog"}', "neither from index to label nor from label to index"),
    "columns.json": (
        '{"features": [{"name": "image", "dtype": "image"}, {"name": "label", "dtype": {}}]}',
        "lists the columns of a data set, not labels: give the names of its class_label alone",
    ),
    "listing.txt": ("a.jpg\nb.jpg\n", "line 1: 'a.jpg' is a picture, not a label"),
    "listing.json": ('{"a.jpg": 0, "b.jpg": 0}', "'a.jpg' is a picture, not a label"),
    "lines.txt": ("a\n" * 100_002, "100002 lines, but at most 100000 labels are read: give"),
    "hole.txt": ("cat\n\ndog\n", "line 2 is empty"),
    "nothing.txt": (" \n", "holds no labels"),
    "more.txt": ("cat\ndog\nfox\n", "3 labels for 2 classes"),
    "labels.toml": ("labels = ['cat', 'dog']", "a file .toml is not read as labels; expected one"),
    "labels.py": ("names = ['cat', 'dog']", "a file .py is not read as labels; expected one"),
    "map.pbtxt": ("item {\n  id: 1\n}\n", "a file .pbtxt is not read as labels"),
    "pointer.txt": ("version https://git-lfs.github.com/spec/v1\nsize 3\n", "git lfs pull"),
    "empty.txt": ("", "an empty file: copy or download it again"),
    "comment.txt": ("# classes\ncat\ndog\n", "3 labels for 2 classes: give one for each class"),
    "other-index.json": (
        '{"0": {"id": 1, "name": "cat"}, "1": {"id": 0, "name": "dog"}}',
        "'0': its entry has the index 1: correct the wrong one",
    ),
    "numbers-twice.json": (
        '{"id2label": {"0": 1, "1": 0}}',
        "id2label: 1: a label must be text, in quotes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_form_leaves_open_is_refused(name: str, tmp_path: Path) -> None:
    assert_refused(tmp_path / name, *REFUSED[name])


def test_other_encodings_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    for content, message in (
        ("cat\ndog\n".encode("utf-16-le"), "UTF-16 without a byte order mark"),
        ("Kätzchen\ndog\n".encode("cp1252"), "not a UTF-8 text file: save it as UTF-8"),
        ("cat\n".encode("utf-16")[:-1], "not a UTF-16 text file"),
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            read_labels(str(file), 2)


@pytest.mark.parametrize("reader", [Mock(return_value=["cat"]), Mock(side_effect=KeyError())])
def test_faulty_label_reader_is_named(
    reader: Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    extension = Extension(name="mine", label_readers=("mine.labels:read",))
    monkeypatch.setattr(label_forms, "extensions", lambda: (extension,))
    monkeypatch.setattr(label_forms, "resolve", lambda name, extension: reader)
    (tmp_path / "labels.ini").write_text("x")
    with pytest.raises(ExtensionError, match="the extension 'mine': `label_readers` failed"):
        read_labels(str(tmp_path / "labels.ini"), 1)
