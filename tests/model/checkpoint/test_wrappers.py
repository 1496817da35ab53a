import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import load_checkpoint
from model.checkpoint.wrappers import without_wrappers
from model.errors import CheckpointError
from tests.model.checkpoint.folders import FOLDERS

WRAPPED = {
    "compiled": ("", "_orig_mod."),
    "in parallel": ("", "module."),
    "compiled blocks": (r"(\.\d+\.)", r"\1_orig_mod."),
    "checkpointed": (r"(\.\d+\.)", r"\1_checkpoint_wrapped_module."),
    "sharded": ("", "_fsdp_wrapped_module._orig_mod."),
    "a class around": ("", "model."),
}


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("format_", FOLDERS)
def test_wrapper_prefixes_are_removed(format_: str, kind: str, tmp_path: Path) -> None:
    FOLDERS[format_](tmp_path)
    expected = load_checkpoint(str(tmp_path)).tensors
    weights = tmp_path / "model.safetensors"
    pattern, wrapped = WRAPPED[kind]
    tensors = load_file(weights)
    save_file(
        {re.sub(pattern, wrapped, name, count=1): tensor for name, tensor in tensors.items()},
        weights,
    )
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint.tensors.items())
    assert any(note.startswith("removed from names of tensors: ") for note in checkpoint.notes)


def test_colliding_names_are_refused(tmp_path: Path) -> None:
    FOLDERS["timm"](tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    twin = {"module.norm.bias": torch.ones_like(tensors["norm.bias"])}
    save_file(tensors | twin, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"both 'norm.bias' without wrappers"):
        load_checkpoint(str(tmp_path))


def test_layer_called_module_keeps_its_name() -> None:
    name = "stages.0.blocks.0.mixer.module.0.c.weight"
    assert without_wrappers({name: torch.zeros(1)}, "a") == ({name: torch.zeros(1)}, ())
