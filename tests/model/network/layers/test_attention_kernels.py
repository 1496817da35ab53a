from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from model.config import ViTConfig
from model.network.layers import attention
from model.network.layers.attention import Attention, mean_row_at_once, mean_row_by_image, plain_attention
from model.network.vit import VisionTransformer
from model.runtime.torch_backend import choose_kernels


def test_plain_attention_is_the_fused_kernels() -> None:
    q, k, v = torch.randn(3, 2, 4, 17, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("queries_at_a_time", [1, 4, 100])
def test_the_mean_row_of_all_images_at_once_is_that_of_each(
    queries_at_a_time: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the queries are divided, in parts that differ too."""
    monkeypatch.setattr(attention, "SCORES_BYTES", queries_at_a_time * 4 * 2 * 7)
    q, k = torch.randn(3, 2, 6, 8), torch.randn(3, 2, 7, 8)
    bias = torch.randn(1, 2, 6, 7) if biased else None
    found = mean_row_at_once(q, k, bias)
    scores = q @ k.transpose(-2, -1) + (0 if bias is None else bias)
    torch.testing.assert_close(found, scores.softmax(dim=-1).mean(dim=2))
    torch.testing.assert_close(mean_row_by_image(q, k, bias), found)


def test_on_a_gpu_maps_of_a_mean_are_made_of_all_images_at_once() -> None:
    config = ViTConfig(
        image_size=(16, 16), patch_size=8, width=32, depth=1, heads=2, mlp_width=64, num_classes=5, pool="mean"
    )
    model = VisionTransformer(config)
    pixels = torch.randn(3, 3, 16, 16)
    one_by_one = model(pixels, (0,)).attention
    choose_kernels(model, torch.device("cuda"))
    [attention] = [module for module in model.modules() if isinstance(module, Attention)]
    assert attention.mean_row is mean_row_at_once
    torch.testing.assert_close(model(pixels, (0,)).attention, one_by_one)
