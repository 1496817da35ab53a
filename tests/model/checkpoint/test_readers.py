"""The readers of extensions: when the core calls them, and its refusal without them."""

import json

import pytest
import torch

from model import checkpoint as readers
from model.checkpoint import Checkpoint, load_checkpoint
from model.checkpoint.files import Files, SingleFile
from model.checkpoint.options import CheckpointOptions
from model.errors import ExtensionError
from model.extension import Extension
from tests.model.checkpoint.folders import (
    CONFIG,
    FOLDERS,
    PREPROCESS,
    adapter_folder,
    native_folder,
    refusal,
    tiny,
)


def read_text(files: Files, options: CheckpointOptions) -> Checkpoint | None:
    """Read a `.txt` file and ignore its content."""
    if not isinstance(files, SingleFile) or files.file.suffix != ".txt":
        return None
    labels = options.labels_or(("a", "b", "c"), CONFIG.num_classes, files.title)
    tensors = files.prepared(tiny())
    return Checkpoint("mine", files.source, "text", "tiny", CONFIG, PREPROCESS, labels, tensors)


def read_inner(files: Files, options: CheckpointOptions) -> Files | None:
    """Read the folder `inner` in place of a folder that contains it."""
    return files.subfolder("inner") if (files.folder / "inner").is_dir() else None


def fail(files: Files, options: CheckpointOptions) -> None:
    raise AssertionError("a core format was given to an extension")


def read_again(files: Files, options: CheckpointOptions) -> Files:
    """Return the same files, which would be read for ever."""
    return files


def read_tensors(files: Files, options: CheckpointOptions) -> object:
    """Return the tensors instead of a checkpoint."""
    return tiny()


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    dotted = tuple(f"{__name__}:{name}" for name in names)
    installed = (Extension(name="mine", readers=dotted),) if names else ()
    monkeypatch.setattr(readers, "extensions", lambda: installed)


def test_extension_reads_a_file(monkeypatch, tmp_path):
    install(monkeypatch, "read_inner", "read_text")
    file = tmp_path / "model.txt"
    file.touch()

    checkpoint = load_checkpoint(str(file), labels="x,y,z")

    assert checkpoint.labels == ("x", "y", "z")
    assert len(checkpoint.content) == 16


def test_extension_names_other_files(monkeypatch, tmp_path):
    install(monkeypatch, "read_inner")
    native_folder(tmp_path / "inner")

    assert load_checkpoint(str(tmp_path)).format == "vitserve"


@pytest.mark.parametrize("kind", FOLDERS)
def test_core_formats_come_first(monkeypatch, kind, tmp_path):
    install(monkeypatch, "fail")

    assert load_checkpoint(str(FOLDERS[kind](tmp_path))).labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        ("fail", "AssertionError: a core format"),
        ("read_again", "TypeError: .*read_again returned SingleFile"),
        ("read_tensors", "TypeError: .*read_tensors returned OrderedDict"),
    ],
)
def test_faulty_reader_is_named(monkeypatch, reader, message, tmp_path):
    install(monkeypatch, reader)
    file = tmp_path / "model.txt"
    file.touch()

    with pytest.raises(ExtensionError, match=f"the extension 'mine': `readers` failed: {message}"):
        load_checkpoint(str(file))


READABLE = r"(folders of vitserve, timm, huggingface; extensions: none)"


def test_single_file_without_extensions(monkeypatch, tmp_path):
    install(monkeypatch)
    torch.save(tiny(), tmp_path / "a.pth")

    message = refusal(tmp_path / "a.pth")

    assert message == f"{tmp_path}/a.pth: no reader for a single file is installed {READABLE}"


def test_adapter_without_extensions(monkeypatch, tmp_path):
    install(monkeypatch)
    native_folder(tmp_path / "a")
    adapter_folder(tmp_path / "a", "base")

    assert "no reader for adapters is installed" in refusal(tmp_path / "a")


def test_unknown_config_names_the_readable(monkeypatch, tmp_path):
    install(monkeypatch, "read_text")
    (tmp_path / "config.json").write_text(json.dumps({"format": "other"}))

    message = refusal(tmp_path)

    assert message.endswith(
        "config.json: not a format that is read (folders of vitserve, timm, huggingface; "
        "extensions: mine)"
    )
