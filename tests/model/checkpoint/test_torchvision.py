"""torchvision's state dicts: logits, the five models, published presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model.checkpoint import PREPROCESS_PRESETS, load_checkpoint
from model.checkpoint import state_dict as reader
from model.checkpoint.layouts import in_layout
from model.errors import CheckpointError
from model.network.vit import count_parameters
from tests.model.checkpoint.parity import assert_same_logits, preprocess_file, randomise
from tests.timm_reference import torchvision


@pytest.mark.parametrize(("patch", "size"), [(16, 32), (32, 96)])
def test_torchvision_logits(patch: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = torchvision().models.VisionTransformer(size, patch, 2, 4, 48, 96, num_classes=7).eval()
    randomise(model)
    state = model.state_dict()
    # As releases of before 2022 name the layers of the MLP.
    old = {n.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): t for n, t in state.items()}
    save_file(state, tmp_path / "mine.safetensors")
    torch.save(old, tmp_path / "old.pth")
    options: dict[str, Any] = {"preprocess": preprocess_file(tmp_path, size, size), "labels": "numbers"}
    with pytest.raises(CheckpointError, match=r"no file says its num_heads: .* --architecture vit,num_heads=N"):
        load_checkpoint(str(tmp_path / "mine.safetensors"), **options)
    checkpoint = load_checkpoint(str(tmp_path / "mine.safetensors"), architecture="vit,num_heads=4", **options)
    assert_same_logits(checkpoint, model, f"torchvision's class in another size, patch {patch}")
    monkeypatch.setitem(reader.TORCHVISION, (48, patch, 2, 96), ("vit_b_16", 4))  # the real sizes take seconds each
    for name in ("mine.safetensors", "old.pth"):
        checkpoint = load_checkpoint(str(tmp_path / name), **options)
        assert checkpoint.architecture == "vit_b_16"
        assert_same_logits(checkpoint, model, f"torchvision {name}, patch {patch}")


@pytest.mark.parametrize("name", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_torchvisions_models_are_told_apart_and_have_its_parameters(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision().models, name)()
    _, tensors = in_layout(theirs.state_dict(), name)
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    sizes = (width, patch, len(theirs.encoder.layers), len(tensors["blocks.0.mlp.fc1.weight"]))
    assert reader.TORCHVISION[sizes] == (name, theirs.encoder.layers[0].num_heads)
    assert sum(tensor.numel() for tensor in tensors.values()) == count_parameters(theirs)


def test_torchvisions_published_transforms_are_those_of_the_presets() -> None:
    presets = {
        (preset.size[0], preset.resize_size[0], preset.interpolation, preset.mean, preset.std): name
        for name, preset in PREPROCESS_PRESETS.items()
        if name.startswith("torchvision")
    }
    for enum in ("ViT_B_16_Weights", "ViT_B_32_Weights", "ViT_L_16_Weights", "ViT_L_32_Weights", "ViT_H_14_Weights"):
        for weights in getattr(torchvision().models, enum):
            published = weights.transforms()
            sizes = published.crop_size[0], published.resize_size[0], published.interpolation.value
            assert (*sizes, tuple(published.mean), tuple(published.std)) in presets, weights
