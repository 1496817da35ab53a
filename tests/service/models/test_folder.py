"""The folder of models: what is an entry, what is not, and how broken ones are named."""

from pathlib import Path
from typing import Any

import pytest

from model.checkpoint.tensor_files import SUFFIXES
from service.errors import SettingsError
from service.models.folder import WEIGHTS, read_folder
from service.models.registry import configured_models
from service.settings import load_settings


def write(folder: Path, **files: str | None) -> None:
    """Files of a folder by name, `__` for a dot; None makes a folder, of a checkpoint."""
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        if text is None:
            path.mkdir()
        (path / "config.json" if text is None else path).write_text(text or "")


def settings_of(folder: Path) -> dict[str, Any]:
    return {name: dict(entry.settings) for name, entry in read_folder(folder)[0].items()}


def test_folders_weights_and_settings_are_models_and_nothing_else_is(tmp_path: Path) -> None:
    write(tmp_path, cats=None, dogs__pth="", README__md="x", labels__txt="a\nb", __hidden=None)
    write(tmp_path, dogs__toml='architecture = "vit_tiny_patch16_224"\nlabels = "labels.txt"\nimage_size = 384')
    write(tmp_path, birds__toml='checkpoint = "owner/birds@main"\ndtype = "float32"\nlabels = "imagenet-1k"')
    (tmp_path / ".git").mkdir()
    assert settings_of(tmp_path) == {
        "birds": {"checkpoint": "owner/birds@main", "dtype": "float32", "labels": "imagenet-1k"},
        "cats": {"checkpoint": str(tmp_path / "cats")},
        "dogs": {
            "architecture": "vit_tiny_patch16_224",
            "labels": str(tmp_path / "labels.txt"),
            "image_size": (384, 384),
            "checkpoint": str(tmp_path / "dogs.pth"),
        },
    }
    assert read_folder(tmp_path)[1] == {}


def test_settings_may_begin_with_a_mark_and_the_suffix_be_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "a.TOML").write_text('checkpoint = "b"', "utf-8-sig")
    assert settings_of(tmp_path) == {"a": {"checkpoint": "b"}}
    (tmp_path / "a.TOML").write_bytes(b'checkpoint = "\xff"')
    assert read_folder(tmp_path)[1] == {"a": f"{tmp_path / 'a.TOML'}: it is not UTF-8, or nested too deeply"}


def test_weights_are_what_checkpoints_may_be() -> None:
    assert set(SUFFIXES) == WEIGHTS


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"a__pth": "", "a__safetensors": ""}, "there are several models of this name: a.pth, a.safetensors"),
        ({"a": None, "a__pt": ""}, "there are several models of this name: a, a.pt"),
        ({"a__toml": 'nonsense = "x"\ncheckpoint = "b"'}, "nonsense: unknown name"),
        ({"a__toml": f"labels = {'[' * 9999}"}, "a.toml: it is not UTF-8, or nested too deeply"),
        ({"a__toml": 'checkpoint = "b"', "a__TOML": ""}, "there are several models of this name: a.TOML, a.toml"),
        ({"a__toml": "not toml"}, "Expected '=' after a key in a key/value pair (at line 1, column 5)"),
        ({"a__toml": 'labels = "numbers"'}, "it names no checkpoint, and no weights of this name lie beside it"),
        ({"a__toml": 'checkpoint = "b"', "a__pth": ""}, "it names a checkpoint, and a.pth lies beside it"),
        ({"a__toml": 'checkpoint = "b"\ndtype = "int8"'}, "dtype: expected 'auto'"),
        ({"a b__pth": ""}, "'a b': a model's name has 1 to 128 of the characters"),
        ({"data__toml": "", "data/x__txt": ""}, "there are neither weights nor a configuration in this folder"),
        ({f"{'x' * 200}__pth": ""}, "a model's name has 1 to 128 of the characters"),
    ],
)
def test_a_broken_entry_is_named_in_one_line_and_the_others_are_read(
    files: dict[str, str | None], problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, good=None, **files)
    entries, problems = read_folder(tmp_path)
    [line] = problems.values()
    assert list(entries) == ["good"]
    assert problem in line
    assert "\n" not in line
    settings = load_settings({"models": str(tmp_path)})
    assert list(configured_models(settings)) == ["good"]
    assert caplog.messages == [f"no model: {line}"]
    with pytest.raises(SettingsError, match="VIT_MODELS"):
        configured_models(load_settings({"models": str(tmp_path), "strict": "true"}))


def test_a_default_that_is_not_there_and_a_folder_without_models_end_the_start(tmp_path: Path) -> None:
    write(tmp_path, b=None, c=None)
    for settings in ({"models": str(tmp_path), "model_name": "d"}, {"models": str(tmp_path / "none")}):
        with pytest.raises(SettingsError, match=r"VIT_MODEL_NAME='d'|VIT_MODELS=.*No such file"):
            configured_models(load_settings(settings))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match="there is no model in this folder"):
        configured_models(load_settings({"models": str(tmp_path / "empty")}))


def test_an_entry_is_another_one_when_a_file_of_it_changes(tmp_path: Path) -> None:
    write(tmp_path, a=None, b__pth="", labels__txt="x", b__toml='labels = "labels.txt"')
    (tmp_path / "a" / "config.json").write_text("{}")
    before, _ = read_folder(tmp_path)
    assert before == read_folder(tmp_path)[0]
    (tmp_path / "a" / "config.json").write_text("{ }")
    (tmp_path / "labels.txt").write_text("y z")
    after, _ = read_folder(tmp_path)
    assert [name for name in after if after[name] != before[name]] == ["a", "b"]
