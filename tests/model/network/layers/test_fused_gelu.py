"""The first layer of an MLP and its GELU as one kernel: where it is used, and how far it is from the exact function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from model.config import Activation, ViTConfig
from model.explanation.methods import EXPLANATIONS, explain
from model.network.layers.block import Mlp
from model.network.vit import VisionTransformer
from model.outputs import MapRequest
from model.runtime.compilation import choose_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def made(activation: Activation = "gelu", *, bias: bool = True) -> VisionTransformer:
    config = ViTConfig(
        image_size=(16, 16),
        patch_size=8,
        width=32,
        depth=2,
        heads=2,
        mlp_width=64,
        num_classes=5,
        activation=activation,
        projection_bias=bias,
    )
    torch.manual_seed(0)
    model = VisionTransformer(config).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def fused(model: VisionTransformer) -> set[bool]:
    return {module.fused for module in model.modules() if isinstance(module, Mlp)}


@pytest.mark.parametrize(
    ("device", "dtype", "activation", "bias", "expected"),
    [
        (GPU, torch.bfloat16, "gelu", True, True),
        (GPU, torch.bfloat16, "gelu_tanh", True, True),
        (GPU, torch.float16, "gelu_tanh", True, True),
        (GPU, torch.float16, "gelu", True, False),
        (GPU, torch.float32, "gelu_tanh", True, False),
        (GPU, torch.bfloat16, "quick_gelu", True, False),
        (GPU, torch.bfloat16, "relu", True, False),
        (GPU, torch.bfloat16, "gelu", False, False),
        (CPU, torch.bfloat16, "gelu", True, False),
    ],
)
def test_it_is_used_only_where_it_is_exact_enough(
    device: torch.device, dtype: torch.dtype, activation: Activation, bias: bool, expected: bool
) -> None:
    model = made(activation, bias=bias)
    choose_kernels(model, device, dtype)
    assert fused(model) == {expected}


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 1.1), (torch.float16, 1.5)])
def test_what_the_approximation_adds_to_rounding_is_known(dtype: torch.dtype, share: float) -> None:
    """So float16 keeps the exact function."""
    x = torch.linspace(-8, 8, 100_001).to(dtype).double()
    exact = F.gelu(x)
    rounding = (exact.to(dtype) - exact).abs().max()
    approximation = (F.gelu(x, approximate="tanh").to(dtype) - exact).abs().max()
    assert share - 0.1 < approximation / rounding < share


def test_it_gives_what_the_two_kernels_give_and_leaves_gradients_to_them() -> None:
    model, pixels = made(), torch.randn(3, 3, 16, 16)
    expected = model(pixels, (1,))
    classes = torch.tensor([0, 1, 2])
    maps = {method: explain(model, pixels, classes, MapRequest(method)) for method in EXPLANATIONS}
    choose_kernels(model, GPU, torch.bfloat16)
    for found, wanted in zip(model(pixels, (1,)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    for method, wanted in maps.items():
        torch.testing.assert_close(explain(model, pixels, classes, MapRequest(method)), wanted)
