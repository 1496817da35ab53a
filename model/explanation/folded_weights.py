"""Products of weights that relevance needs, computed once for a model whose weights no longer
change.

Going back through a block's attention takes its output projection, the scale after it, its values'
projection and the norm before. Each is linear, and some are as cheap to compute as a few small
products; together they are one matrix.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.explanation.explicit_forward import blocks_of
from model.explanation.frozen_gradients import through_norm_unscaled
from model.explanation.maps import gaussian, is_coarse
from model.network.layers.block import Block, LayerScale
from model.network.vit import VisionTransformer
from model.outputs import RIVALS

# Of the smoothing on a coarse grid, in patches.
_SIGMA: Final = 0.64


class FoldedWeights(NamedTuple):
    """What `fold` makes of a model, in its dtype and on its device; of projections as weights of
    linear layers.

    Attributes:
        margin: the factors of the logits of a class and of its rivals in the class's margin,
            float32 [1 + rivals, 1]. They are divided by the heads' largest weight: the scale of
            relevance does not matter, and float16 holds it.
        last: from the last block's gradient to each head's, [D, D]; of the pooling where that
            attends. None where the head reads all tokens otherwise.
        values: from each head's gradient through its values to what enters the last block, but for
            its norm's scale, [heads, head_dim, D]; None unless the head reads few tokens.
        hops: as `last`, of each block that relevance is moved through, from the last on: [hops D,
        D].
        smoothing: what the relevance of all tokens is multiplied by, float32 [N, N]; None unless
        the grid is coarse.
    """

    margin: Tensor
    last: Tensor | None
    values: Tensor | None
    hops: Tensor
    smoothing: Tensor | None


@torch.no_grad()
def fold(model: VisionTransformer) -> FoldedWeights:
    """Return the weights for `model.explanation.relevance`: as many as a third of a block has."""
    if model.config.pool == "cls":
        return fold_at_block(model, blocks_of(model))
    folded = fold_at_tokens(model, blocks_of(model))
    if model.attn_pool is None:
        return folded
    return folded._replace(last=_transposed(model.attn_pool.proj.weight))


def fold_at_tokens(model: VisionTransformer, blocks: list[Block]) -> FoldedWeights:
    """Return the weights where relevance begins at the output of the last of these blocks."""
    hops = [_projection(block) for block in reversed(blocks[-hops_of(model.config) :])]
    joined = torch.cat(hops) if hops else model.head.weight.new_zeros(0, model.config.width)
    rivals = min(RIVALS, model.config.logits - 1)
    largest = torch.stack([head.weight.abs().amax() for head in heads_of(model)]).amax().float()
    margin = torch.tensor([[1.0], *[[-1 / max(rivals, 1)]] * rivals]).to(joined.device)
    margin = margin / largest.clamp_min(torch.finfo(torch.float32).tiny)
    smoothing = _smoothing(model.config, joined.device) if is_coarse(model.config) else None
    return FoldedWeights(margin, None, None, joined, smoothing)


def fold_at_block(model: VisionTransformer, blocks: list[Block]) -> FoldedWeights:
    """Return the weights where relevance begins at the first tokens of the last of these blocks'
    output.
    """
    last = blocks[-1]
    weight = last.attn.qkv.weight
    values = through_norm_unscaled(last.norm1, weight[2 * model.config.inner_width :].float())
    by_head = values.reshape(model.config.heads, -1, model.config.width).to(weight.dtype)
    return fold_at_tokens(model, blocks[:-1])._replace(last=_projection(last), values=by_head)


def hops_of(config: ViTConfig) -> int:
    """Return how many blocks back relevance is moved; see `model.explanation.relevance`."""
    return 3 if is_coarse(config) else 2


def _smoothing(config: ViTConfig, device: torch.device) -> Tensor:
    """Return the matrix [N, N] that smooths patches by a Gaussian of `_SIGMA`, and leaves prefix
    tokens as they are.
    """
    down, across = (torch.from_numpy(gaussian(size, _SIGMA)) for size in config.grid)
    matrix = torch.eye(config.tokens, device=device)
    matrix[config.prefix_tokens :, config.prefix_tokens :] = torch.kron(down, across).T
    return matrix


def heads_of(model: VisionTransformer) -> list[nn.Linear]:
    """Return the head, and the distillation token's if the model has it."""
    return [head for head in (model.head, model.head_dist) if head is not None]


def _projection(block: Block) -> Tensor:
    weight = block.attn.proj.weight
    if isinstance(block.ls1, LayerScale):
        weight = (weight.float() * block.ls1.gamma.float().unsqueeze(1)).to(weight.dtype)
    return _transposed(through_norm_unscaled(block.attn.norm, weight.float()).to(weight.dtype))


def _transposed(weight: Tensor) -> Tensor:
    return weight.t().clone(memory_format=torch.contiguous_format)
