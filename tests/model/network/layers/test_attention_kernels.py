from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from model.network.layers import attention
from model.network.layers.attention import mean_row, plain_attention


def test_plain_attention_is_the_fused_kernels() -> None:
    q, k, v = torch.randn(3, 2, 4, 17, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("queries_at_a_time", [1, 4, 100])
def test_the_mean_row_is_the_mean_of_softmax_rows(
    queries_at_a_time: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the queries are divided, in parts that differ too."""
    monkeypatch.setattr(attention, "SCORES_BYTES", queries_at_a_time * 8 * 4 * 2 * 7)
    q, k = torch.randn(3, 2, 6, 8), torch.randn(3, 2, 7, 8)
    bias = torch.randn(1, 2, 6, 7) if biased else None
    found = mean_row(q, k, bias)
    scores = q @ k.transpose(-2, -1) + (0 if bias is None else bias)
    torch.testing.assert_close(found, scores.softmax(dim=-1).mean(dim=2))
