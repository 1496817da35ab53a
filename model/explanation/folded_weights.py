"""Products of weights for relevance, computed once per model after its weights are final.

The backward step through a block's attention takes four linear maps: the output projection, the
scale after it, the projection of the values, and the norm before them. Their products are
precomputed as single matrices.
"""

from collections.abc import Sequence
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


class ReadoutWeights(NamedTuple):
    """Weights for one place where tokens are read, stored like weights of linear layers.

    Attributes:
        last: from the gradient after the last block to the gradients of its attention heads, P of
            `model.explanation.relevance`: [H head_dim, D]. With attention pooling, from the pooled
            vector's gradient to the gradients of the pooling's heads. None for other readouts of
            all tokens.
        values: from each attention head's gradient through its values to the last block's input,
            except for the scale of its norm, V: [H, head_dim, D]. None if all tokens are read.
        hops: P of each block that relevance is traced back through, last block first: [hops H
            head_dim, D]. None without such blocks.
    """

    last: Tensor | None
    values: Tensor | None
    hops: Tensor | None


class FoldedWeights(NamedTuple):
    """The result of `fold`, in the model's dtype and on its device.

    Attributes:
        margin: weights of the logits of a class and of its rivals in the class's margin, float32 [1
            + rivals, 1]. They are divided by the heads' largest weight, so that float16 holds
            relevance, whose scale does not matter.
        smoothing: factor for the relevance of all tokens, float32 [N, N]; None unless the grid is
            coarse.
        readouts: weights for the head, or for each of the `transfer_parts`.
    """

    margin: Tensor
    smoothing: Tensor | None
    readouts: tuple[ReadoutWeights, ...]


@torch.no_grad()
def fold(model: VisionTransformer, *, transfer: bool = False) -> FoldedWeights:
    """Return the weights for `model.explanation.class_relevance`.

    They have as many numbers as a third of a block's weights; with transfer features, as many as a
    whole block.

    Args:
        model: the network.
        transfer: whether the weights are for transfer features, also if the model's head reads
            others.
    """
    config = model.config
    blocks = blocks_of(model)
    if transfer or config.pool == "transfer":
        readouts = [
            _readout_weights(config, blocks[: part.block + 1], few_tokens=part.is_token)
            for part in transfer_parts(config)
        ]
    else:
        weights = _readout_weights(config, blocks, few_tokens=config.pool == "cls")
        if model.attn_pool is not None:
            # A copy, because OpenVINO confuses a square weight with its transpose.
            weights = weights._replace(last=model.attn_pool.proj.weight.t().contiguous())
        readouts = [weights]
    margin = _margin_weights(model)
    smoothing = _smoothing(config, margin.device) if is_coarse(config) else None
    return FoldedWeights(margin, smoothing, tuple(readouts))


def _readout_weights(
    config: ViTConfig, blocks: Sequence[Block], *, few_tokens: bool
) -> ReadoutWeights:
    """Return the weights for tokens that are read after the last of these blocks."""
    last: Tensor | None = None
    values: Tensor | None = None
    if few_tokens:
        block = blocks[-1]
        blocks = blocks[:-1]
        last = _projection(block)
        weight = block.attn.qkv.weight
        values = through_norm_unscaled(block.norm1, weight[2 * config.inner_width :].float())
        values = values.reshape(config.heads, -1, config.width).to(weight.dtype)
    hops = [_projection(block) for block in reversed(blocks[-hops_of(config) :])]
    return ReadoutWeights(last, values, torch.cat(hops) if hops else None)


def _margin_weights(model: VisionTransformer) -> Tensor:
    """Return `FoldedWeights.margin`."""
    rivals = min(RIVALS, model.config.logits - 1)
    largest = torch.stack([head.weight.abs().amax() for head in heads_of(model)]).amax().float()
    signs = torch.tensor([[1.0], *[[-1 / max(rivals, 1)]] * rivals]).to(largest.device)
    return signs / largest.clamp_min(torch.finfo(torch.float32).tiny)


def hops_of(config: ViTConfig) -> int:
    """Return the number of blocks that relevance is traced back through."""
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
    """Return P of a block, except for the division by the deviation in the attention's norm."""
    weight = block.attn.proj.weight
    if isinstance(block.ls1, LayerScale):
        weight = (weight.float() * block.ls1.gamma.float().unsqueeze(1)).to(weight.dtype)
    return through_norm_unscaled(block.attn.norm, weight.float()).to(weight.dtype).t().contiguous()
