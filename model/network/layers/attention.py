"""Multi-head self-attention, its row for maps, and the kernels that compute both.

`Attention.attend` computes softmax(QK^T / sqrt(d)) V. Such a kernel takes q, k and v, [B, heads, N,
head_dim], and returns q's shape; q may have fewer tokens than k and v.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ViTConfig
from model.network.layers.position import relative_position_index, relative_table_size
from model.network.layers.rotary import Rotary

# Limit in bytes of the scores that are alive at once in `chunked_attention`: a core's share of the
# cache.
SCORES_BYTES: Final = 8 << 20


def norm_or_none(width: int, eps: float, *, present: bool) -> nn.Module:
    """Return a LayerNorm if `present`, else the identity."""
    return nn.LayerNorm(width, eps=eps) if present else nn.Identity()


class AttentionInputs(NamedTuple):
    """The inputs of the attention heads.

    Attributes:
        q: after its norm and rotation, [B, heads, Q, head_dim].
        k: after its norm and rotation, [B, heads, N, head_dim].
        v: [B, heads, N, head_dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor


class Attention(nn.Module):
    """Multi-head self-attention with one fused QKV projection.

    Attributes:
        attend: the kernel; may be replaced.
    """

    relative_position_index: Tensor
    fixed_bias: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.inner_width = config.inner_width
        self.head_dim = config.inner_width // config.heads
        self.cls_query = config.attention_source == "cls"
        self.prefix_tokens = config.prefix_tokens
        self.grid = config.grid
        self.qkv = nn.Linear(config.width, 3 * config.inner_width, bias=config.qkv_bias)
        self.q_norm = norm_or_none(self.head_dim, config.norm_eps, present=config.qk_norm)
        self.k_norm = norm_or_none(self.head_dim, config.norm_eps, present=config.qk_norm)
        self.rotary = None if config.rotary is None else Rotary(config)
        self.norm = norm_or_none(config.inner_width, config.norm_eps, present=config.attention_norm)
        self.proj = nn.Linear(config.inner_width, config.width, bias=config.projection_bias)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = F.scaled_dot_product_attention
        self.register_buffer("fixed_bias", None, persistent=False)
        self.relative_position_bias_table: nn.Parameter | None = None
        if config.relative_position_bias:
            entries = relative_table_size(self.grid, config.class_token)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(entries, self.heads))
            index = relative_position_index(self.grid, config.class_token)
            self.register_buffer("relative_position_index", index, persistent=False)

    def forward(
        self,
        x: Tensor,
        return_attention: bool = False,
        queries: int | None = None,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor | None, AttentionInputs]:
        """Return the attended tokens, the attention row for a map, and the inputs of the heads.

        Args:
            x: [B, N, D].
            return_attention: whether to return the attention row.
            queries: number of first tokens that are queries; None: all. All tokens have keys and
                values.
            keep: whether later steps multiply by keys and values again. Each attention head's are
                then made contiguous, because products would otherwise copy them each time.

        Returns:
            [B, queries or N, D]; [B, heads, N] float32 or None; and the inputs of the attention
            heads.
        """
        batch = x.shape[0]
        q, k, v = self.project(x) if queries is None else self._project_queries(x, queries)
        if keep:
            k = k.clone(memory_format=torch.contiguous_format)
            v = v.clone(memory_format=torch.contiguous_format)
        bias = self.bias()
        row = self._attention_row(q, k, bias) if return_attention else None
        if bias is None:
            x = self.attend(q, k, v)
        else:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, :, :queries])
        x = self.proj(self.norm(x.transpose(1, 2).reshape(batch, -1, self.inner_width)))
        return x, row, AttentionInputs(q, k, v)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs q, k and v of the attention heads, each [B, heads, N, head_dim].

        Args:
            x: [B, N, D].
        """
        fused = self.qkv(x)
        qkv = fused.reshape(*fused.shape[:2], 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self._with_positions(q, self.q_norm), self._with_positions(k, self.k_norm), v

    def _with_positions(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return queries or keys, [B, heads, Q, head_dim], after their norm and rotation."""
        normed: Tensor = norm(x)
        return normed if self.rotary is None else self.rotary(normed)

    def _project_queries(self, x: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q of the first tokens, [B, heads, queries, head_dim], and k and v of all."""
        batch, tokens, _ = x.shape
        q = self._project_rows(x[:, :queries], slice(self.inner_width))
        kv = self._project_rows(x, slice(self.inner_width, None))
        q = q.reshape(batch, -1, self.heads, self.head_dim).transpose(1, 2)
        k, v = (
            kv.reshape(batch, tokens, 2, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        )
        return self._with_positions(q, self.q_norm), self._with_positions(k, self.k_norm), v

    def _project_rows(self, x: Tensor, rows: slice) -> Tensor:
        """Map [B, N, D] to these rows of the fused projection's output, [B, N, rows]."""
        bias = None if self.qkv.bias is None else self.qkv.bias[rows]
        return F.linear(x, self.qkv.weight[rows], bias)

    def bias(self) -> Tensor | None:
        """Return the bias of the scores, [1, heads, N, N], or None."""
        if self.relative_position_bias_table is None or self.fixed_bias is not None:
            return self.fixed_bias
        by_pair = self.relative_position_bias_table[self.relative_position_index]
        return by_pair.permute(2, 0, 1).unsqueeze(0)

    @torch.no_grad()
    def fix_bias(self) -> None:
        """Compute the bias once, for a model whose weights are final and on their device.

        Gathering it from its table in each pass costs as much as a small product. Also, a CUDA
        graph cannot capture an index from another device.
        """
        bias = self.bias()
        if bias is not None:
            # Fused kernels read rows at multiples of 16 elements. Without the padding, they would
            # copy the bias at each call.
            padded = F.pad(bias, (0, -bias.shape[-1] % 16))
            self.fixed_bias = padded[..., : bias.shape[-1]]

    def _attention_row(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        """Return the attention row for a map: [B, heads, N] float32.

        Softmax rows are independent, so the CLS row needs only q_cls and never the N x N matrix. A
        model without a CLS token in its readout has no single query. Its row is the mean over the
        patch queries.
        """
        scale = self.head_dim**-0.5
        if self.cls_query:
            scores = (q[:, :, :1] * scale) @ k.transpose(-2, -1)  # [B, heads, 1, N]
            if bias is not None:
                scores = scores + bias[:, :, :1]
            row: Tensor = scores.float().softmax(dim=-1).squeeze(2)
            return row
        patches = slice(self.prefix_tokens, None)
        return mean_row(q[:, :, patches] * scale, k, None if bias is None else bias[:, :, patches])


def chunked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention step by step, for as many images at once as keep the scores in cache.

    On a CPU with native bfloat16, it takes 0.6 to 0.9 of the time of the fused kernel, which
    computes in float32 there. This holds if one image's scores fit in `SCORES_BYTES`. For larger
    scores and for float32, this function calls the fused kernel, which is then faster.
    """
    batch, heads, queries, _ = q.shape
    image_bytes = heads * queries * k.shape[2] * q.element_size()
    if q.dtype != torch.bfloat16 or image_bytes > SCORES_BYTES:
        return F.scaled_dot_product_attention(q, k, v)
    images = SCORES_BYTES // image_bytes
    if images >= batch:
        return plain_attention(q, k, v)
    parts = zip(*(torch.split(tensor, images) for tensor in (q, k, v)), strict=True)
    return torch.cat([plain_attention(*part) for part in parts])


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention step by step.

    On a CPU in bfloat16, forward and backward, it is two (577 tokens) to five times (33 tokens)
    faster than the fused kernel. In float32, the fused kernel is faster.
    """
    scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    attended: Tensor = scores.softmax(dim=-1) @ v
    return attended


def mean_row(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return the mean over queries of softmax(QK^T), [B, heads, N] float32.

    It processes so few queries at a time that the scores of eight images fit into the cache. That
    number does not depend on the batch, so compiled code works for any batch.

    Args:
        q: scaled, [B, heads, Q, head_dim].
        k: [B, heads, N, head_dim].
        bias: of the scores, [1, heads, Q, N], or None.
    """
    _, heads, queries, _ = q.shape
    step = max(1, SCORES_BYTES // (8 * 4 * heads * k.shape[2]))
    rows = []
    for start in range(0, queries, step):
        part = slice(start, start + step)
        scores = q[:, :, part] @ k.transpose(-2, -1)  # [B, heads, step, N]
        if bias is not None:
            scores = scores + bias[:, :, part]
        rows.append(scores.float().softmax(dim=-1).sum(dim=2))
    return torch.stack(rows).sum(dim=0) / queries
