"""The folder of models: entries, other files, and messages about broken entries."""

import os
import socket
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from model.checkpoint import BUNDLED
from model.checkpoint.tensor_files import SUFFIXES
from model.errors import CheckpointError
from service.engine.backbones import PROBLEM
from service.engine.checkpoint_files import checkpoint_from
from service.errors import SettingsError
from service.model_settings import PATHS
from service.models import folder as folder_module
from service.models.configured import configured_models, notes_on_folder
from service.models.folder import WEIGHTS, FolderEntry, in_time, read_folder
from service.settings import load_settings


def write(folder: Path, **files: str | None) -> None:
    """Write files of a folder by name, with `__` for a dot; None makes a folder of a checkpoint."""
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        if text is None:
            path.mkdir()
        (path / "config.json" if text is None else path).write_text(text or "")


def settings_of(folder: Path) -> dict[str, Any]:
    return {name: dict(entry.settings) for name, entry in read_folder(folder)[0].items()}


def test_only_valid_entries_are_models(tmp_path: Path) -> None:
    write(tmp_path, cats=None, dogs__pth="", README__md="x", labels__txt="a\nb", __hidden=None)
    write(
        tmp_path,
        dogs__toml='architecture = "vit_tiny_patch16_224"\nlabels = "labels.txt"\nimage_size = 384',
    )
    write(
        tmp_path,
        birds__toml='checkpoint = "owner/birds@main"\ndtype = "float32"\nlabels = "imagenet-1k"',
    )
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


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.TOML").write_text('checkpoint = "a/b"', "utf-8-sig")
    assert settings_of(tmp_path) == {"a": {"checkpoint": "a/b"}}
    (tmp_path / "a.TOML").write_bytes(b'checkpoint = "\xff"')
    assert read_folder(tmp_path)[1] == {
        "a": f"{tmp_path / 'a.TOML'}: it is not UTF-8, or nested too deeply"
    }


def test_labels_of_an_entry_may_be_a_list(tmp_path: Path) -> None:
    write(tmp_path, a__toml='checkpoint = "a/b"\nlabels = ["cup/mug", "dog"]')
    assert settings_of(tmp_path) == {"a": {"checkpoint": "a/b", "labels": '["cup/mug", "dog"]'}}


def test_weights_are_what_checkpoints_may_be() -> None:
    assert set(SUFFIXES) == WEIGHTS


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {"a__pth": "", "a__safetensors": ""},
            "several models have this name: a.pth, a.safetensors",
        ),
        ({"a": None, "a__pt": ""}, "several models have this name: a, a.pt"),
        (
            {"a__toml": 'nonsense = "x"\ncheckpoint = "b"'},
            "nonsense: unknown name; available: checkpoint, ",
        ),
        (
            {"a__toml": 'lables = "x"\ncheckpoint = "b"'},
            "lables: unknown name: did you mean labels?",
        ),
        (
            {"a__toml": 'Image-Size = 1\ncheckpoint = "b"'},
            "Image-Size: unknown name: did you mean image_size?",
        ),
        ({"a__toml": f"labels = {'[' * 9999}"}, "a.toml: it is not UTF-8, or nested too deeply"),
        (
            {"a__toml": 'checkpoint = "b"', "a__TOML": ""},
            "several models have this name: a.TOML, a.toml",
        ),
        (
            {"a__toml": "not toml"},
            "Expected '=' after a key in a key/value pair (at line 1, column 5)",
        ),
        (
            {"a__toml": 'labels = "numbers"'},
            "it does not name a checkpoint, and the folder has no weights of this name",
        ),
        (
            {"a__toml": 'checkpoint = "b"', "a__pth": ""},
            "it names a checkpoint, but the folder also has a.pth",
        ),
        ({"a__toml": 'checkpoint = "b"\ndtype = "int8"'}, "dtype: expected 'auto'"),
        ({"a b__pth": ""}, "'a b': a model's name has 1 to 128 of the characters"),
        (
            {"data__toml": "", "data/x__txt": ""},
            "this folder has neither weights nor a configuration",
        ),
        ({f"{'x' * 200}__pth": ""}, "a model's name has 1 to 128 of the characters"),
    ],
)
def test_a_broken_entry_spares_the_others(
    files: dict[str, str | None], problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, good=None, **files)
    entries, problems = read_folder(tmp_path)
    [line] = problems.values()
    assert list(entries) == ["good"]
    assert problem in line
    assert "\n" not in line
    settings = load_settings({"models": str(tmp_path)})
    configured = configured_models(settings)
    assert configured == {**entries, next(iter(problems)): FolderEntry({PROBLEM: line}, {})}
    assert configured_models(settings, {**configured, **dict.fromkeys(problems, entries["good"])})
    assert caplog.messages == [f"not reloaded: {line}"]
    with pytest.raises(SettingsError, match="VIT_MODELS"):
        configured_models(load_settings({"models": str(tmp_path), "strict": "true"}))


def test_a_missing_default_ends_the_start(
    tmp_path: Path,
) -> None:
    write(tmp_path, b=None, c=None)
    for settings in (
        {"models": str(tmp_path), "model_name": "d"},
        {"models": str(tmp_path / "none")},
    ):
        with pytest.raises(SettingsError, match=r"VIT_MODEL_NAME='d'|VIT_MODELS=.*No such file"):
            configured_models(load_settings(settings))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match="this folder has no models"):
        configured_models(load_settings({"models": str(tmp_path / "empty")}))


def test_a_lone_head_names_what_it_lacks(tmp_path: Path) -> None:
    metadata = b'{"__metadata__":{"format":"vitserve-head"}}'
    (tmp_path / "pets.safetensors").write_bytes(len(metadata).to_bytes(8, "little") + metadata)

    with pytest.raises(SettingsError, match=r"no models: pets\.safetensors is a taught head: add"):
        configured_models(load_settings({"models": str(tmp_path)}))


def test_a_changed_file_changes_its_entry(tmp_path: Path) -> None:
    write(tmp_path, a=None, b__pth="", labels__txt="x", b__toml='labels = "labels.txt"')
    (tmp_path / "a" / "config.json").write_text("{}")
    before, _ = read_folder(tmp_path)
    assert before == read_folder(tmp_path)[0]
    (tmp_path / "a" / "config.json").write_text("{ }")
    (tmp_path / "labels.txt").write_text("y z")
    after, _ = read_folder(tmp_path)
    assert [name for name in after if after[name] != before[name]] == ["a", "b"]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder of models, and write a secret file outside of it."""
    (tmp_path / "secret.env").write_text("VIT_ADMIN_KEY=hunter2")
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.mark.parametrize("setting", PATHS)
@pytest.mark.parametrize(
    "value",
    [
        "../secret.env",
        "{outside}",
        "link",
        "sub/../../secret.env",
        "linked/secret.env",
        "/none/late.txt",
    ],
)
def test_a_path_out_of_the_models_is_refused(setting: str, value: str, models: Path) -> None:
    (models / "link").symlink_to(models.parent / "secret.env")
    (models / "linked").symlink_to(models.parent)
    others = "" if setting == "checkpoint" else 'checkpoint = "a/b"\n'
    path = value.format(outside=models.parent / "secret.env")
    (models / "a.toml").write_text(f'{others}{setting} = "{path}"')
    entries, problems = read_folder(models)
    assert entries == {}
    assert f"{setting} '{path}': this file is not below {models}" in problems["a"]
    assert "VIT_CHECKPOINT_FOLDER" in problems["a"]
    assert "hunter2" not in problems["a"]


def test_an_operator_allows_another_folder(models: Path) -> None:
    (models / "a.toml").write_text('checkpoint = "a/b"\nlabels = "../secret.env"')
    settings = load_settings({"models": str(models), "checkpoint_folder": str(models.parent)})
    entry = configured_models(settings)["a"]
    assert Path(entry.settings["labels"]).samefile(models.parent / "secret.env")


def test_linked_settings_are_refused(models: Path) -> None:
    (models.parent / "other.toml").write_text('hunter2 = "x"')
    (models / "a.toml").symlink_to(models.parent / "other.toml")
    assert read_folder(models)[1] == {
        "a": f"{models / 'a.toml'}: a symbolic link out of its folder: put the file itself there"
    }


def test_a_link_that_is_set_later_is_refused(models: Path) -> None:
    write(models, a__toml='checkpoint = "bundled"\nlabels = "labels.txt"', labels__txt="x")
    settings = load_settings({"models": str(models)})
    own = settings.model_copy(update=dict(configured_models(settings)["a"].settings))
    (models / "labels.txt").unlink()
    (models / "labels.txt").symlink_to(models.parent / "secret.env")
    with pytest.raises(
        CheckpointError, match=r"labels .* a symbolic link out of its folder"
    ) as refused:
        checkpoint_from(own)
    assert "hunter2" not in str(refused.value)


@pytest.mark.timeout(20)  # a pipe without a writer is not read
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "huge"])
def test_settings_are_small_regular_files(kind: str, models: Path) -> None:
    path = models / "x.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 100 << 30)
    write(models, good=None)
    entries, problems = read_folder(models)
    assert list(entries) == ["good"]
    assert len(problems) == 1


@pytest.mark.timeout(20)
def test_pipes_of_a_model_are_refused(models: Path) -> None:
    os.mkfifo(models / "a.pth")
    os.mkfifo(models / "labels.txt")
    (models / "b.toml").write_text('checkpoint = "bundled"\nlabels = "labels.txt"')
    settings = load_settings({"models": str(models)})
    for entry in configured_models(settings).values():
        with pytest.raises(
            CheckpointError, match="a device, pipe or socket, expected a regular file"
        ):
            checkpoint_from(settings.model_copy(update=dict(entry.settings)))


def test_a_silent_folder_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "READ_SECONDS", 0.01)
    answers = Event()
    with pytest.raises(TimeoutError, match=r"the folder was not read within 0\.01 s"):
        in_time(answers.wait, "the folder")
    answers.set()


JUNK = (
    "__MACOSX",
    ".ipynb_checkpoints",
    "lost+found",
    "Thumbs.db",
    ".DS_Store",
    "desktop.ini",
    "a.toml~",
)


def test_junk_is_skipped_silently(models: Path) -> None:
    for name in JUNK:
        (models / name).mkdir()
        (models / name / "._config.json").touch()
    write(models, good=None)
    assert read_folder(models)[1] == {}
    settings = load_settings({"models": str(models)})
    assert notes_on_folder(settings, configured_models(settings)) == []


def test_unread_files_are_one_line(models: Path) -> None:
    write(models, good=None, notes__txt="x", names__txt="a", spare__toml='weights = "ema"')
    write(models, used__toml='[[tensor]]\nfrom = "a"\nto = "b"')
    write(models, b__toml='checkpoint = "a/b"\nlabels = "names.txt"\nkeys = "used.toml"')
    settings = load_settings({"models": str(models), "labels": "imagenet-1k"})
    entries = configured_models(settings)
    assert list(entries) == ["b", "good"]
    assert notes_on_folder(settings, entries) == [
        f"VIT_MODELS='{models}': not read: notes.txt, spare.toml",
        "VIT_LABELS is not read for b: they have labels of their own",
    ]


@pytest.mark.parametrize("part", ["config.json", "adapter_config.json"])
def test_the_folder_of_one_model_is_refused(part: str, models: Path) -> None:
    write(models, model__safetensors="")
    (models / part).touch()
    with pytest.raises(SettingsError, match=f"the folder of one model, .*: --checkpoint {models} "):
        configured_models(load_settings({"models": str(models)}))


def test_a_file_is_not_a_folder_of_models(models: Path) -> None:
    write(models, model__safetensors="")
    with pytest.raises(SettingsError, match="expected a folder of models; --checkpoint"):
        configured_models(load_settings({"models": str(models / "model.safetensors")}))


def test_a_checkpoint_excludes_a_folder(models: Path) -> None:
    write(models, good=None)
    with pytest.raises(
        SettingsError, match=r"VIT_CHECKPOINT='cats': VIT_MODELS=.* set one of them"
    ):
        configured_models(load_settings({"models": str(models), "checkpoint": "cats"}))


def test_the_bundled_path_is_allowed(models: Path) -> None:
    (models / "a.toml").write_text(f'checkpoint = "{BUNDLED}"')
    assert settings_of(models) == {"a": {"checkpoint": str(BUNDLED)}}
    (models / "a.toml").write_text(f'checkpoint = "{BUNDLED}/../../../pyproject.toml"')
    assert "this file is not below" in read_folder(models)[1]["a"]
