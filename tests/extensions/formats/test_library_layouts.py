"""State dicts with the names of vit-pytorch, torch, transformers, mmpretrain and torchvision."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from model.checkpoint import PREPROCESS_PRESETS, load_checkpoint
from model.checkpoint.files import SingleFile
from model.errors import CheckpointError
from model.extensions.formats.inferred import TORCHVISION
from model.extensions.formats.layouts import in_layout
from model.network.vit import count_parameters
from tests.extensions.formats.home_made import load, made
from tests.model.checkpoint import transformers_models
from tests.model.checkpoint.parity import (
    assert_same_logits,
    preprocess_file,
    randomise,
)
from tests.timm_reference import declare_torchvision_operators, timm, torchvision


def vit_pytorch() -> Any:
    declare_torchvision_operators()
    pytest.importorskip("einops", reason="einops is not installed")
    return pytest.importorskip("vit_pytorch", reason="vit-pytorch is not installed")


LITTLE = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 48, "depth": 2, "mlp_dim": 64}


@pytest.mark.parametrize(
    ("kind", "options", "architecture"),
    [
        ("ViT", {"heads": 4, "dim_head": 16}, "vit,num_heads=4"),  # inner width 64
        ("ViT", {"heads": 3, "dim_head": 16, "pool": "mean"}, "vit,num_heads=3"),
        ("ViT", {"heads": 2, "dim_head": 24, "mlp_dim": 48}, "vit,num_heads=2"),  # square layers
        (
            "SimpleViT",
            {"heads": 3, "dim_head": 16},
            "vit,num_heads=3",
        ),  # positions without a tensor
    ],
)
def test_vit_pytorch(kind: str, options: dict[str, Any], architecture: str, tmp_path: Path) -> None:
    model = getattr(vit_pytorch(), kind)(**(LITTLE | options)).eval()
    randomise(model)
    with pytest.raises(
        CheckpointError, match=r"its num_heads: .* --architecture vit,num_heads=N --"
    ):
        load(model.state_dict(), tmp_path)
    checkpoint = load(model.state_dict(), tmp_path, architecture)
    assert_same_logits(checkpoint, model, f"vit-pytorch {kind} {options}")
    assert "act_layer=gelu, as vit-pytorch has it (VIT_ARCHITECTURE)" in checkpoint.assumed


class EncoderViT(nn.Module):
    """A ViT around torch's encoder, which users often write."""

    def __init__(self, *, norm_first: bool, activation: str = "gelu", hidden: int = 64) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, 48, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 48))
        self.pos_embedding = nn.Parameter(torch.zeros(1, 17, 48))
        layer = nn.TransformerEncoderLayer(
            48, 3, hidden, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(48), enable_nested_tensor=False
        )
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(48, 5))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embedding
        y: Tensor = self.classifier(self.encoder(x)[:, 0])
        return y


@pytest.mark.parametrize(
    ("order", "activation", "hidden"), [("pre", "relu", 64), ("post", "gelu", 48)]
)
def test_torchs_own_encoder(order: str, activation: str, hidden: int, tmp_path: Path) -> None:
    model = EncoderViT(norm_first=order == "pre", activation=activation, hidden=hidden).eval()
    randomise(model)
    with pytest.raises(
        CheckpointError, match=r"norm_order=pre,act_layer=gelu,global_pool=token.*only usual"
    ):
        load(model.state_dict(), tmp_path)
    given = f"vit,num_heads=3,norm_order={order},act_layer={activation},global_pool=token"
    assert_same_logits(
        load(model.state_dict(), tmp_path, given), model, f"TransformerEncoder {order}"
    )


@pytest.mark.parametrize("original", [True, False])
def test_transformers_weights_without_config(original: bool, tmp_path: Path) -> None:
    model = transformers_models.make("vit", tmp_path, save_original_format=original)
    source = tmp_path / "model.safetensors"
    source.rename(tmp_path / "alone.safetensors")
    preprocess = preprocess_file(tmp_path, model.config.image_size, model.config.image_size)
    given = f"vit,num_heads={model.config.num_attention_heads}"
    checkpoint = load_checkpoint(
        str(tmp_path / "alone.safetensors"),
        architecture=given,
        preprocess=preprocess,
        labels="numbers",
    )
    assert_same_logits(
        checkpoint, lambda pixels: model(pixels).logits, "transformers without a config"
    )


_MMPRETRAIN = (
    (r"^blocks\.(\d+)\.norm([12])", r"backbone.layers.\1.ln\2"),
    (r"^blocks\.(\d+)\.mlp\.fc1", r"backbone.layers.\1.ffn.layers.0.0"),
    (r"^blocks\.(\d+)\.mlp\.fc2", r"backbone.layers.\1.ffn.layers.1"),
    (r"^blocks\.", "backbone.layers."),
    (r"^norm\.", "backbone.ln1."),
    (r"^patch_embed\.proj", "backbone.patch_embed.projection"),
    (r"^(cls_token|pos_embed)$", r"backbone.\1"),
    (r"^head\.", "head.layers.head."),
)


def test_mmpretrain(tmp_path: Path) -> None:
    model = made()
    state = {}
    for name, tensor in model.state_dict().items():
        rules = (rule for rule in _MMPRETRAIN if re.search(rule[0], name))
        state[re.sub(*next(rules), name)] = tensor
    content = {"meta": {"mmpretrain_version": "1.2.0"}, "state_dict": state}
    checkpoint = load(content, tmp_path, "vit,num_heads=3")
    assert_same_logits(checkpoint, model, "mmpretrain")


def _renamed(state: dict[str, Tensor], *rules: tuple[str, str]) -> dict[str, Tensor]:
    for pattern, new in rules:
        state = {re.sub(pattern, new, name): tensor for name, tensor in state.items()}
    return state


_GATED = ((r"mlp\.fc1_g", "mlp.w1"), (r"mlp\.fc1_x", "mlp.w2"), (r"mlp\.fc2", "mlp.w3"))


@pytest.mark.parametrize("biases", [True, False])
def test_dinov3s_own_file(biases: bool, tmp_path: Path) -> None:
    name = f"vit_small_plus_patch16_dinov3{'_qkvb' if biases else ''}"
    model = timm().create_model(name, depth=2, img_size=32, num_classes=5).eval()
    randomise(model)
    rules = (("reg_token", "storage_tokens"), (r"gamma_([12])", r"ls\1.gamma"), *_GATED)
    state = _renamed(model.state_dict(), *rules)
    for block in ("blocks.0.attn", "blocks.1.attn"):
        queries, values = (
            state.pop(f"{block}.{part}_bias", torch.zeros(384)) for part in ("q", "v")
        )
        unused = torch.ones(384) if biases else torch.zeros(384)
        state[f"{block}.qkv.bias"] = torch.cat((queries, unused, values))
        state[f"{block}.qkv.bias_mask"] = torch.ones(3 * 384)
    others = {"mask_token": torch.ones(1, 384), "rope_embed.periods": torch.ones(16)}
    checkpoint = load(
        state | others, tmp_path, f"{name},depth=2", preprocess=preprocess_file(tmp_path, 32, 32)
    )
    assert_same_logits(checkpoint, model, f"DINOv3's own {name}")


def test_eva02s_own_file(tmp_path: Path) -> None:
    sizes = {"depth": 2, "embed_dim": 48, "num_heads": 3}
    model = timm().create_model("eva02_base_patch14_448", num_classes=5, img_size=28, **sizes)
    randomise(model.eval())
    rules = ((r"mlp\.norm", "mlp.ffn_ln"), (r"attn\.norm", "attn.inner_attn_ln"), *_GATED)
    state = _renamed(model.state_dict(), *rules)
    architecture = "eva02_base_patch14_448,depth=2,embed_dim=48,num_heads=3"
    checkpoint = load(
        {"module": state}, tmp_path, architecture, preprocess=preprocess_file(tmp_path, 28, 28)
    )
    assert_same_logits(checkpoint, model, "EVA-02's own")


@pytest.mark.parametrize("case", ["dinov2", "clip"])
def test_transformers_folder_is_asked_for(case: str, tmp_path: Path) -> None:
    model = transformers_models.make(case, tmp_path)
    with pytest.raises(CheckpointError, match="names of transformers: give the folder that save_"):
        load(model.state_dict(), tmp_path, "vit,num_heads=4")


@pytest.mark.parametrize(("patch", "size"), [(16, 32), (32, 96)])
def test_torchvision_logits(
    patch: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = torchvision().models.VisionTransformer(size, patch, 2, 4, 48, 96, num_classes=7).eval()
    randomise(model)
    state = model.state_dict()
    # The names of the MLP's layers in releases before 2022.
    old = {
        n.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): t
        for n, t in state.items()
    }
    save_file(state, tmp_path / "mine.safetensors")
    torch.save(old, tmp_path / "old.pth")
    options: dict[str, Any] = {
        "preprocess": preprocess_file(tmp_path, size, size),
        "labels": "numbers",
    }
    with pytest.raises(
        CheckpointError, match=r"no file says its num_heads: .* --architecture vit,num_heads=N"
    ):
        load_checkpoint(str(tmp_path / "mine.safetensors"), **options)
    checkpoint = load_checkpoint(
        str(tmp_path / "mine.safetensors"), architecture="vit,num_heads=4", **options
    )
    assert_same_logits(checkpoint, model, f"torchvision's class in another size, patch {patch}")
    monkeypatch.setitem(
        TORCHVISION, (48, patch, 2, 96), ("vit_b_16", 4)
    )  # the real sizes take seconds each
    for name in ("mine.safetensors", "old.pth"):
        checkpoint = load_checkpoint(str(tmp_path / name), **options)
        assert checkpoint.architecture == "vit_b_16"
        assert_same_logits(checkpoint, model, f"torchvision {name}, patch {patch}")


@pytest.mark.parametrize("name", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_torchvisions_models_are_recognised(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision().models, name)()
    _, tensors = in_layout(theirs.state_dict(), SingleFile(Path(name), name))
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    sizes = (width, patch, len(theirs.encoder.layers), len(tensors["blocks.0.mlp.fc1.weight"]))
    assert TORCHVISION[sizes] == (name, theirs.encoder.layers[0].num_heads)
    assert sum(tensor.numel() for tensor in tensors.values()) == count_parameters(theirs)


def test_presets_match_torchvision() -> None:
    presets = {
        (preset.size[0], preset.resize_size[0], preset.interpolation, preset.mean, preset.std): name
        for name, preset in PREPROCESS_PRESETS.items()
        if name.startswith("torchvision")
    }
    for enum in (
        "ViT_B_16_Weights",
        "ViT_B_32_Weights",
        "ViT_L_16_Weights",
        "ViT_L_32_Weights",
        "ViT_H_14_Weights",
    ):
        for weights in getattr(torchvision().models, enum):
            published = weights.transforms()
            sizes = published.crop_size[0], published.resize_size[0], published.interpolation.value
            assert (*sizes, tuple(published.mean), tuple(published.std)) in presets, weights
