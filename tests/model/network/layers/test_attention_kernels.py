from __future__ import annotations

import torch
import torch.nn.functional as F

from model.network.layers.attention_kernels import plain_attention


def test_plain_attention_is_the_fused_kernels() -> None:
    q, k, v = torch.randn(3, 2, 4, 17, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
