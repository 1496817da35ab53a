"""Products of weights for relevance, computed once per model after its weights are final.

The backward step through a block's attention takes four linear maps: the output projection, the
scale after it, the projection of the values, and the norm before them. Their products are
precomputed as single matrices.
"""

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.explanation.frozen_gradients import through_norm_unscaled
from model.explanation.maps import gaussian, is_coarse
from model.network.layers.block import Block, LayerScale
from model.network.transfer import transfer_parts
from model.network.vit import VisionTransformer, blocks_of
from model.outputs import RIVALS

# Standard deviation of the smoothing on a coarse grid, in patches.
_SIGMA: Final = 0.64


class FoldedWeights(NamedTuple):
    """The result of `fold`, in the model's dtype and on its device.

    Projections are stored like weights of linear layers.

    Attributes:
        margin: weights of the logits of a class and of its rivals in the class's margin, float32 [1
            + rivals, 1]. They are divided by the heads' largest weight, so that float16 holds
            relevance, whose scale does not matter.
        last: from the last block's gradient to the gradients of its attention heads, [D, D]; with
            attention pooling, from the pooled vector's gradient. None if the head reads all tokens
            in another way.
        values: from each attention head's gradient through its values to the last block's input,
            except for the scale of its norm, [heads, head_dim, D]. None unless the head reads few
            tokens.
        hops: like `last`, for each block that relevance is moved through, last block first: [hops
            D, D].
        smoothing: factor for the relevance of all tokens, float32 [N, N]; None unless the grid is
            coarse.
        parts: `fold_parts`, if the head reads transfer features.
    """

    margin: Tensor
    last: Tensor | None
    values: Tensor | None
    hops: Tensor
    smoothing: Tensor | None
    parts: "tuple[FoldedWeights, ...]" = ()


@torch.no_grad()
def fold(model: VisionTransformer) -> FoldedWeights:
    """Return the weights for `model.explanation.relevance`.

    They are as many as a third of a block's weights, or as a block's for transfer features.
    """
    if model.config.pool == "cls":
        return fold_at_block(model, blocks_of(model))
    folded = fold_at_tokens(model, blocks_of(model))
    if model.config.pool == "transfer":
        return folded._replace(parts=fold_parts(model))
    if model.attn_pool is None:
        return folded
    return folded._replace(last=_transposed(model.attn_pool.proj.weight))


@torch.no_grad()
def fold_parts(model: VisionTransformer) -> tuple[FoldedWeights, ...]:
    """Return the weights for each of the `transfer_parts`."""
    folded = []
    for part in transfer_parts(model.config):
        blocks = blocks_of(model)[: part.block + 1]
        fold_part = fold_at_block if part.is_token else fold_at_tokens
        folded.append(fold_part(model, blocks))
    return tuple(folded)


def fold_at_tokens(model: VisionTransformer, blocks: list[Block]) -> FoldedWeights:
    """Return the weights for relevance that begins at the output of the last of these blocks."""
    hops = [_projection(block) for block in reversed(blocks[-hops_of(model.config) :])]
    joined = torch.cat(hops) if hops else model.head.weight.new_zeros(0, model.config.width)
    rivals = min(RIVALS, model.config.logits - 1)
    largest = torch.stack([head.weight.abs().amax() for head in heads_of(model)]).amax().float()
    signs = torch.tensor([[1.0], *[[-1 / max(rivals, 1)]] * rivals]).to(joined.device)
    margin = signs / largest.clamp_min(torch.finfo(torch.float32).tiny)
    smoothing = _smoothing(model.config, joined.device) if is_coarse(model.config) else None
    return FoldedWeights(margin, None, None, joined, smoothing)


def fold_at_block(model: VisionTransformer, blocks: list[Block]) -> FoldedWeights:
    """Return the weights for relevance that begins at the first tokens of the last block."""
    last = blocks[-1]
    weight = last.attn.qkv.weight
    values = through_norm_unscaled(last.norm1, weight[2 * model.config.inner_width :].float())
    by_head = values.reshape(model.config.heads, -1, model.config.width).to(weight.dtype)
    return fold_at_tokens(model, blocks[:-1])._replace(last=_projection(last), values=by_head)


def hops_of(config: ViTConfig) -> int:
    """Return the number of blocks that `model.explanation.relevance` goes back."""
    return 3 if is_coarse(config) else 2


def _smoothing(config: ViTConfig, device: torch.device) -> Tensor:
    """Return the matrix [N, N] that smooths patches by a Gaussian of `_SIGMA`.

    Prefix tokens stay unchanged.
    """
    down, across = (gaussian(size, _SIGMA) for size in config.grid)
    matrix = np.eye(config.tokens, dtype=np.float32)
    matrix[config.prefix_tokens :, config.prefix_tokens :] = np.kron(down, across).T
    return torch.from_numpy(matrix).to(device)


def heads_of(model: VisionTransformer) -> list[nn.Linear]:
    """Return the head, and the distillation token's head if there is one."""
    return [head for head in (model.head, model.head_dist) if head is not None]


def _projection(block: Block) -> Tensor:
    weight = block.attn.proj.weight
    if isinstance(block.ls1, LayerScale):
        weight = (weight.float() * block.ls1.gamma.float().unsqueeze(1)).to(weight.dtype)
    return _transposed(through_norm_unscaled(block.attn.norm, weight.float()).to(weight.dtype))


def _transposed(weight: Tensor) -> Tensor:
    return weight.t().clone(memory_format=torch.contiguous_format)
