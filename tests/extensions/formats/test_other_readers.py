"""Readers of other extensions, beside those of this one."""

import pytest

from model import checkpoint as readers
from model.checkpoint import Checkpoint, load_checkpoint
from model.checkpoint.files import Files
from model.checkpoint.options import CheckpointOptions
from model.extension import Extension
from model.extensions.formats import EXTENSION
from tests.model.checkpoint.folders import CONFIG, PREPROCESS, tiny


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read any file, and ignore its content."""
    labels = ("a", "b", "c")
    return Checkpoint("mine", files.source, "mine", "tiny", CONFIG, PREPROCESS, labels, tiny())


@pytest.mark.parametrize("name", ["model.mine", "model.onnx"])
def test_later_extension_reads_other_names(monkeypatch, name, tmp_path):
    later = Extension(name="mine", readers=(f"{__name__}:read",))
    monkeypatch.setattr(readers, "extensions", lambda: (EXTENSION, later))
    (tmp_path / name).touch()

    assert load_checkpoint(str(tmp_path / name)).format == "mine"
