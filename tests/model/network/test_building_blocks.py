"""The parts of the field, each against its definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.checkpoint import load_checkpoint, native
from model.checkpoint.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.insight.summary import summarise
from model.network.layers.block import ACTIVATIONS
from model.network.layers.patch_embed import LinearPatchEmbed, PatchEmbed
from model.network.layers.position import (
    relative_position_index,
    relative_table_size,
    resize_relative_table,
    sincos2d_position_embedding,
)
from model.network.library import meta_network
from model.network.vit import VisionTransformer, count_parameters
from tests.model.blocks import drawn_model
from tests.model.checkpoint.parity import randomise

SMALL = ViTConfig(image_size=(32, 48), patch_size=8, width=32, depth=2, heads=4, mlp_width=64, num_classes=5)


def checkpoint(config: ViTConfig) -> Checkpoint:
    model = VisionTransformer(config)
    randomise(model)
    channels = config.in_channels
    preprocess = PreprocessConfig(
        size=config.image_size,
        resize="squash",
        resize_size=config.image_size,
        interpolation="bilinear",
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
    )
    labels = tuple(f"class {i}" for i in range(config.num_classes))
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Checkpoint("tiny", "here", "vitserve", "tiny", config, preprocess, labels, tensors)


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
    [("tiny", 16, 5.7), ("small", 16, 22.1), ("base", 16, 86.6), ("large", 16, 304.3), ("huge", 14, 632.0)],
)
def test_parameter_counts_are_the_published_ones(size: str, patch: int, published: float) -> None:
    config = ViTConfig(image_size=(224, 224), patch_size=patch, num_classes=1000, **SIZES[size])
    assert round(count_parameters(meta_network(config)) / 1e6, 1) == published


@pytest.mark.parametrize("remainder", [0, 3])
def test_patches_by_convolution_and_by_a_linear_layer_are_the_same(remainder: int) -> None:
    size = (32 + remainder, 48 + remainder)
    config = SMALL.model_copy(update={"image_size": size, "drop_remainder": bool(remainder)})
    convolution, linear = PatchEmbed(config), LinearPatchEmbed(config)
    randomise(convolution)
    assert convolution.proj.bias is not None
    with torch.no_grad():
        linear.proj.weight.copy_(convolution.proj.weight.flatten(1))
        linear.proj.bias.copy_(convolution.proj.bias)
        pixels = torch.randn(2, 3, *size)
        torch.testing.assert_close(linear(pixels), convolution(pixels), atol=1e-5, rtol=1e-5)


def test_sine_cosine_positions_by_their_definition() -> None:
    rows, columns, width = 3, 5, 16
    table = sincos2d_position_embedding((rows, columns), width, prefix_tokens=2)
    assert table.shape == (1, 2 + 15, width)
    assert (table[0, :2] == 0).all()
    y, x = 2, 3
    omega = [10_000 ** -(i / 3) for i in range(4)]
    expected = torch.tensor([x * w for w in omega]), torch.tensor([y * w for w in omega])
    row = torch.cat((expected[0].sin(), expected[0].cos(), expected[1].sin(), expected[1].cos()))
    torch.testing.assert_close(table[0, 2 + y * columns + x], row)


def test_a_sine_cosine_model_is_recomputed_at_another_size() -> None:
    config = SMALL.model_copy(update={"position_embedding": "sincos2d"})
    model = drawn_model(config)
    assert model.pos_embed is not None
    assert not model.pos_embed.requires_grad
    small = replace(checkpoint(config), tensors=model.state_dict())
    torch.testing.assert_close(small.tensors["pos_embed"], model.fixed_position_embedding())
    resized = small.resized((64, 64))
    expected = sincos2d_position_embedding((8, 8), 32, prefix_tokens=1)
    torch.testing.assert_close(resized.tensors["pos_embed"], expected)
    assert resized.build()(torch.zeros(1, 3, 64, 64)).logits.shape == (1, 5)


def test_relative_positions_depend_on_the_offset_alone() -> None:
    index = relative_position_index((3, 4))
    assert index.shape == (13, 13)
    assert index.max() == relative_table_size((3, 4)) - 1
    patch = index[1:, 1:].reshape(3, 4, 3, 4)
    assert patch[0, 0, 1, 2] == patch[1, 1, 2, 3]
    assert patch[0, 0, 1, 2] != patch[1, 2, 0, 0]
    assert len(index[1:, 1:].unique()) == 5 * 7
    assert len({int(index[0, 0]), int(index[0, 5]), int(index[5, 0])}) == 3
    table = torch.randn(relative_table_size((3, 3)), 2)
    assert torch.equal(resize_relative_table(table, (3, 3), (3, 3)), table)
    assert resize_relative_table(table, (3, 3), (5, 4)).shape == (relative_table_size((5, 4)), 2)


def test_quick_gelu_by_its_definition() -> None:
    x = torch.linspace(-4, 4, 9)
    torch.testing.assert_close(ACTIVATIONS["quick_gelu"](x), x / (1 + torch.exp(-1.702 * x)))


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
    "rotary-learned": {"rotary": {"learned": True}, "attention_norm": True, "pool": "attention", "pool_heads": 4},
    "hybrid": {"stem": {"layers": []}},
    "hybrid-2": {"stem": {"layers": [1, 1]}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_native_folder_gives_back_what_was_written(variant: str, tmp_path: Path) -> None:
    config = ViTConfig.model_validate(SMALL.model_dump() | VARIANTS[variant])
    written = checkpoint(config)
    native.write(tmp_path, written, dtype=torch.float32)
    read = load_checkpoint(str(tmp_path))
    assert read.config == config
    pixels = torch.randn(2, config.in_channels, *config.image_size)
    with torch.inference_mode():
        expected, got = written.build()(pixels, (0, 1)), read.build()(pixels, (0, 1))
    assert all(torch.equal(tensor, written.tensors[name]) for name, tensor in read.tensors.items())
    # Not to the last bit: a kernel may sum in another order where a tensor lies otherwise in memory.
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert got.attention is not None
    torch.testing.assert_close(got.attention.sum(-1), torch.ones(2, 2, 4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_is_its_images_one_by_one(variant: str) -> None:
    config = ViTConfig.model_validate(SMALL.model_dump() | VARIANTS[variant])
    model = checkpoint(config).build()
    pixels = torch.randn(3, config.in_channels, *config.image_size)
    with torch.inference_mode():
        together = model(pixels).logits
        alone = torch.cat([model(pixels[i : i + 1]).logits for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_summary_says_every_part(variant: str) -> None:
    config = ViTConfig.model_validate(SMALL.model_dump() | VARIANTS[variant])
    made = replace(checkpoint(config), notes=("labels: preset imagenet-1k",))
    rows = summarise(made)
    wanted = {"family", "input", "tokens", "pooling", "preprocessing", "labels", "parameters", "memory"}
    assert wanted <= rows.keys()
    assert rows["parameters"] == f"{count_parameters(made.build()):,}"
    assert rows["tokens"].startswith(f"{config.tokens}:")
    assert "imagenet-1k" in rows["notes"]
    assert all("\n" not in value for value in rows.values())


def test_relative_positions_refuse_another_size() -> None:
    config = ViTConfig.model_validate(SMALL.model_dump() | VARIANTS["relative"])
    with pytest.raises(CheckpointError, match="relative position biases are not resized"):
        checkpoint(config).resized((64, 64))


@pytest.mark.parametrize("channels", [2, 4])
def test_a_model_of_no_pictures_channels_is_refused(channels: int) -> None:
    with pytest.raises(CheckpointError, match="channels"):
        checkpoint(SMALL.model_copy(update={"in_channels": channels}))
