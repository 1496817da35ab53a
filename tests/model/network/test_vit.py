"""What the network gives beside what libraries give, with which the tests of checkpoints compare it."""

from __future__ import annotations

import pytest
import torch

from model.config import ViTConfig
from model.network.layers import attention
from model.network.vit import VisionTransformer


def test_layers_come_in_the_order_asked_for() -> None:
    torch.manual_seed(0)
    config = ViTConfig(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=3, mlp_width=96, num_classes=7)
    model = VisionTransformer(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.02, std=0.3)
    pixels = torch.randn(2, 3, 32, 48)
    every = model(pixels, (0, 1, 2)).attention
    torch.testing.assert_close(model(pixels, (2, 0)).attention, every[:, [2, 0]])
    assert model(pixels).attention is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [1 << 30, 3 * 2 * 9 * 9 * 2, 10])
def test_chunked_attention_is_attention(dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES_BYTES", limit)  # all at once, three images at a time, none
    q, k, v = torch.randn(3, 7, 2, 9, 16).to(dtype).unbind(0)
    for queries in (q, q[:, :, :1]):
        expected = torch.nn.functional.scaled_dot_product_attention(queries.float(), k.float(), v.float())
        got = attention.chunked_attention(queries, k, v)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, atol=3e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)
