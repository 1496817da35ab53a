"""The building blocks of the network, each compared with its definition."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model.checkpoint import load_checkpoint, native
from model.config import ViTConfig
from model.errors import CheckpointError
from model.network.layers import attention
from model.network.layers.attention import mean_row, plain_attention
from model.network.layers.position import (
    sincos2d_position_embedding,
)
from model.network.library import meta_network
from model.network.vit import VisionTransformer, count_parameters
from tests.support.random_checkpoint import random_checkpoint

SMALL = ViTConfig(
    image_size=(32, 48), patch_size=8, width=32, depth=2, heads=4, mlp_width=64, num_classes=5
)

# The paper's variants (Dosovitskiy et al. 2020, table 1), and Tiny and Small (Touvron et al. 2020).
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"width": 192, "depth": 12, "heads": 3, "mlp_width": 768},
    "small": {"width": 384, "depth": 12, "heads": 6, "mlp_width": 1536},
    "base": {"width": 768, "depth": 12, "heads": 12, "mlp_width": 3072},
    "large": {"width": 1024, "depth": 24, "heads": 16, "mlp_width": 4096},
    "huge": {"width": 1280, "depth": 32, "heads": 16, "mlp_width": 5120},
}


@pytest.mark.parametrize(
    ("size", "patch", "published"),
    [
        ("tiny", 16, 5.7),
        ("small", 16, 22.1),
        ("base", 16, 86.6),
        ("large", 16, 304.3),
        ("huge", 14, 632.0),
    ],
)
def test_parameter_counts_are_as_published(size: str, patch: int, published: float) -> None:
    config = ViTConfig(image_size=(224, 224), patch_size=patch, num_classes=1000, **SIZES[size])
    assert round(count_parameters(meta_network(config)) / 1e6, 1) == published


def test_sincos_positions_fit_another_size() -> None:
    config = SMALL.model_copy(update={"position_embedding": "sincos2d"})
    model = VisionTransformer(config)
    model.reset_parameters()
    assert model.pos_embed is not None
    assert not model.pos_embed.requires_grad
    small = replace(random_checkpoint(config), tensors=model.state_dict())
    torch.testing.assert_close(small.tensors["pos_embed"], model.fixed_position_embedding())
    resized = small.resized((64, 64))
    expected = sincos2d_position_embedding((8, 8), 32, prefix_tokens=1)
    torch.testing.assert_close(resized.tensors["pos_embed"], expected)
    assert resized.build()(torch.zeros(1, 3, 64, 64)).logits.shape == (1, 5)


VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "registers": {"registers": 3, "position_prefix": False},
    "distilled": {"distillation_token": True, "distillation_head": True},
    "mean": {"pool": "mean", "class_token": False, "norm_after_pool": True},
    "max": {"pool": "max"},
    "attention": {"pool": "attention", "class_token": False},
    "cls-mean": {"pool": "cls_mean", "layer_scale": True},
    "swiglu": {"mlp": "swiglu", "activation": "silu", "qk_norm": True},
    "clip": {"norm_before_blocks": True, "patch_bias": False, "final_norm": False},
    "greyscale-linear": {"in_channels": 1, "patch_embedding": "linear"},
    "no-bias": {"qkv_bias": False, "projection_bias": False},
    "sincos": {"position_embedding": "sincos2d"},
    "relative": {"position_embedding": "none", "relative_position_bias": True},
    "rotary": {"rotary": {"temperature": 50.0, "centred": True}, "registers": 2},
    "rotary-learned": {
        "rotary": {"learned": True},
        "attention_norm": True,
        "pool": "attention",
        "pool_heads": 4,
    },
    "hybrid": {"stem": {"layers": []}},
    "hybrid-2": {"stem": {"layers": [1, 1]}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_native_folder_round_trips(variant: str, tmp_path: Path) -> None:
    config = ViTConfig.model_validate(SMALL.model_dump() | VARIANTS[variant])
    written = random_checkpoint(config)
    native.write(tmp_path, written, dtype=torch.float32)
    read = load_checkpoint(str(tmp_path))
    assert read.config == config
    pixels = torch.randn(2, config.in_channels, *config.image_size)
    with torch.inference_mode():
        expected = written.build()(pixels, (0, 1))
        got = read.build()(pixels, (0, 1))
    assert all(torch.equal(tensor, written.tensors[name]) for name, tensor in read.tensors.items())
    # Not bit for bit, because a kernel may sum in another order if a tensor's layout differs.
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert got.attention is not None
    torch.testing.assert_close(got.attention.sum(-1), torch.ones(2, 2, 4), atol=1e-5, rtol=0)


def test_relative_positions_keep_their_size() -> None:
    config = ViTConfig.model_validate(SMALL.model_dump() | VARIANTS["relative"])
    with pytest.raises(CheckpointError, match="relative position biases are not resized"):
        random_checkpoint(config).resized((64, 64))


@pytest.mark.parametrize("channels", [2, 4])
def test_wrong_number_of_channels_is_refused(channels: int) -> None:
    with pytest.raises(CheckpointError, match="channels"):
        random_checkpoint(SMALL.model_copy(update={"in_channels": channels}))


def test_plain_attention_equals_the_kernel() -> None:
    q, k, v = torch.randn(3, 2, 4, 17, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("queries_at_a_time", [1, 4, 100])
def test_mean_row_equals_softmax_mean(
    queries_at_a_time: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any division of the queries has the same result, also into unequal parts."""
    monkeypatch.setattr(attention, "SCORES_BYTES", queries_at_a_time * 8 * 4 * 2 * 7)
    q = torch.randn(3, 2, 6, 8)
    k = torch.randn(3, 2, 7, 8)
    bias = torch.randn(1, 2, 6, 7) if biased else None
    found = mean_row(q, k, bias)
    scores = q @ k.transpose(-2, -1) + (0 if bias is None else bias)
    torch.testing.assert_close(found, scores.softmax(dim=-1).mean(dim=2))
