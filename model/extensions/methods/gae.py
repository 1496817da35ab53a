"""Generic attention explainability (Chefer, Gur and Wolf, ICCV 2021).

https://arxiv.org/abs/2103.15679. Attention weighted by its gradient is followed through all blocks.
R starts as the identity, and each block adds A R to R. A is the mean over the attention heads of
the positive part of gradient x attention. A map needs only one row of R, which is the product of
all (I + A). The row is therefore multiplied from the last block to the first, in the order of the
backward pass, without R itself.

The row is that of the CLS token, or the mean of the rows of the tokens that the head reads (see
`readout`). With attention pooling, it starts as the pooling query's row.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from model.explanation.readout import Weighed, mix, over_all_tokens, readout, weigh_pool
from model.extensions.methods.explicit_forward import block_inputs, finish, weigh
from model.network.layers.block import Block
from model.network.transfer import transfer_parts
from model.network.vit import AttentionPool, VisionTransformer, blocks_of
from model.outputs import Pooling


def gae(model: VisionTransformer, pixels: Tensor, targets: Tensor, features: Pooling) -> Tensor:
    """Return the relevance of each token for its image's target: float32 [B, N], >= 0.

    Args:
        pixels: [B, C, H, W], normalised, in the model's dtype.
        targets: classes, int64 [B], or rows of another head, float32 [B, D].
        features: embedding that the other head reads, if the targets are rows.
    """
    if "transfer" in (features, model.config.pool):
        rows = targets if targets.is_floating_point() else model.head.weight[targets]
        return gae_of_transfer(model, pixels, rows)
    if targets.is_floating_point():
        return gae_of_classes(
            _with_head(model, targets), pixels, torch.arange(len(targets), device=targets.device)
        )
    return gae_of_classes(model, pixels, targets)


def gae_of_classes(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of each token for classes [B] of the model's head: float32 [B, N]."""
    inputs = block_inputs(model, pixels, output=True)
    row, gradient = _last_row(model, inputs.pop(), classes)
    for block, x in zip(reversed(blocks_of(model)), reversed(inputs), strict=True):
        row, gradient = _through_block(block, x, row, gradient)
    return row


def gae_of_transfer(model: VisionTransformer, pixels: Tensor, directions: Tensor) -> Tensor:
    """Return the relevance of each token for a head that reads transfer features: float32 [B, N].

    The row and the gradient of each part are added after the block that the head reads.

    Args:
        directions: rows of the head, floats [B, `embedding_width` of `transfer`].
    """
    config = model.config
    x = block_inputs(model, pixels, output=True)
    by_part = torch.split(directions.to(pixels.dtype), config.width, dim=1)
    row = torch.zeros(x[0].shape[:2], device=pixels.device)
    gradient = torch.zeros_like(x[0])
    for index in reversed(range(config.depth)):
        for part, direction in zip(transfer_parts(config), by_part, strict=True):
            if part.block == index:
                share = part.share(x[index + 1], config)
                row = row + share
                gradient = gradient + _gradient_of_part(model, x[index + 1], share, direction)
        row, gradient = _through_block(blocks_of(model)[index], x[index], row, gradient)
    return row


def _gradient_of_part(
    model: VisionTransformer, x: Tensor, share: Tensor, direction: Tensor
) -> Tensor:
    """Return the gradient of a part of the transfer features along a direction.

    The gradient is with respect to tokens x [B, N, D], whose shares in the part are [B, N].
    """
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        pooled = model.fc_norm((model.norm(leaf) * share.unsqueeze(2).to(leaf.dtype)).sum(dim=1))
        (gradient,) = torch.autograd.grad((pooled * direction).sum(), leaf)
    return gradient


def _through_block(block: Block, x: Tensor, row: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the gradient before a block.

    Args:
        x: input of the block, [B, N, D].
        row, gradient: after the block.
    """
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        weighed = weigh(block, leaf)
        output = finish(block, leaf, weighed)
        to_weights, before = torch.autograd.grad(output, (weighed.weights, leaf), gradient)
    attention = _positive_mean(weighed.weights.detach(), to_weights)
    return row + (row.unsqueeze(1) @ attention).squeeze(1), before


def _last_row(model: VisionTransformer, x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row, float32 [B, N], and the gradient of the logit for x [B, N, D]."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        if model.attn_pool is None:
            score = _class_scores(model.read(leaf), classes)
            (gradient,) = torch.autograd.grad(score, leaf)
            return readout(model.config, x), gradient
        weighed = weigh_pool(model.attn_pool, model.norm(leaf))
        score = _class_scores(_finish_pool(model, model.attn_pool, weighed), classes)
        to_weights, gradient = torch.autograd.grad(score, (weighed.weights, leaf))
    row = _positive_mean(weighed.weights.detach(), to_weights).squeeze(1)
    return over_all_tokens(row, model.config), gradient


def _finish_pool(model: VisionTransformer, pool: AttentionPool, weighed: Weighed) -> Tensor:
    """Return the logits [B, num_classes] of the pooled tokens."""
    pooled = pool.proj(mix(weighed)).squeeze(1)
    return model.classify(model.projected(pooled + pool.mlp(pool.norm(pooled))))


def _class_scores(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the sum of the images' class logits; its gradient is separate for each image."""
    return logits.gather(1, classes.unsqueeze(1)).sum()


def _positive_mean(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the mean over attention heads of relu(gradient x attention): [B, Q, N].

    Args:
        weights, gradient: [B, heads, Q, N].
    """
    return (weights * gradient).relu().mean(dim=1)


def _with_head(model: VisionTransformer, rows: Tensor) -> VisionTransformer:
    """Return the model with a head of these rows, [classes, D]; it shares all other tensors."""
    tensors: dict[int, Any] = {
        id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
    }
    twin = copy.deepcopy(model, tensors)  # new modules, shared tensors
    dtype = model.head.weight.dtype
    twin.head = nn.Linear(rows.shape[1], len(rows), device=rows.device, dtype=dtype)
    with torch.no_grad():
        twin.head.weight.copy_(rows)
    if twin.head_dist is not None:  # the embedding is the mean of both tokens
        twin.head_dist = twin.head
    return twin
