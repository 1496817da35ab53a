"""The explanation methods by name, and maps over the patch grid made with them.

Rollout and generic attention explainability follow attention through the blocks and stand here;
`relevance` has a file of its own. Each returns how much every token mattered.
"""

import copy
from typing import Any, Final

import torch
from torch import Tensor, nn

from model.explanation.explicit_forward import (
    block_inputs,
    blocks_of,
    class_scores,
    finish,
    finish_pool,
    over_all_tokens,
    readout,
    weigh,
    weigh_pool,
)
from model.explanation.folded_weights import FoldedWeights, fold
from model.explanation.maps import sharpened_maps, token_maps
from model.explanation.relevance import kept_blocks, token_relevance
from model.explanation.transfer_relevance import seeds_of
from model.network.layers.block import Block
from model.network.vit import VisionTransformer
from model.outputs import METHODS, MapRequest, Method, Pooling

# Bound on the bytes of one block's attention weights that are alive at once; a pass has a few
# tensors of that size.
_WEIGHTS_BYTES: Final = 64 << 20

# The methods that have, or can have, a pass of their own: all but `cls`.
EXPLANATIONS: Final[tuple[Method, ...]] = tuple(method for method in METHODS if method != "cls")


@torch.no_grad()
def rollout(model: VisionTransformer, pixels: Tensor) -> Tensor:
    """Return how much of each input token arrives at what the head reads: float32 [B, N], each row
    summing to 1.

    Abnar and Zuidema 2020, https://arxiv.org/abs/2005.00928; it knows no class. Each block's matrix
    is the mean of its heads' attention plus the identity, for the residual connection, with rows
    that sum to 1.
    """
    x = block_inputs(model, pixels, output=model.attn_pool is not None)
    if model.attn_pool is None:
        row = readout(model.config, x[0])
    else:
        row = weigh_pool(model.attn_pool, model.norm(x[-1])).weights.mean(dim=1).squeeze(1)
        row = over_all_tokens(row, model.config)
    for block, entering in zip(
        reversed(blocks_of(model)), reversed(x[: model.config.depth]), strict=True
    ):
        row = (row + (row.unsqueeze(1) @ weigh(block, entering).weights.mean(dim=1)).squeeze(1)) / 2
    return row


def gae(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of each token for the class by generic attention explainability: float32
    [B, N], >= 0.

    Chefer, Gur and Wolf, ICCV 2021, https://arxiv.org/abs/2103.15679. Attention weighed by its
    gradient is followed through all blocks: R = I, then R += A R in each block, where A is the mean
    over the heads of the positive part of gradient x attention. A map needs one row of R, and R is
    the product of all (I + A), so the row is multiplied from the last block to the first: in the
    order of the backward pass, and without R.

    The row is the CLS token's, or the mean over the rows of the tokens that the head reads (see
    `readout`). With attention pooling it begins as the pooling query's own row.
    """
    x = block_inputs(model, pixels, output=True)
    row, gradient = _last_row(model, x.pop(), classes)
    for block, entering in zip(reversed(blocks_of(model)), reversed(x), strict=True):
        row, gradient = _through(block, entering, row, gradient)
    return row


def gae_of_transfer(model: VisionTransformer, pixels: Tensor, directions: Tensor) -> Tensor:
    """Return what `gae` does for a class of a head that reads transfer features: float32 [B, N].

    The row and the gradient of each part are added after the block that it is read from.

    Args:
        directions: the class's row of the head, floats [B, `embedding_width` of `transfer`].
    """
    config = model.config
    x = block_inputs(model, pixels, output=True)
    parts = list(
        zip(
            seeds_of(config),
            torch.split(directions.to(pixels.dtype), config.width, dim=1),
            strict=True,
        )
    )
    row = torch.zeros(x[0].shape[:2], device=pixels.device)
    gradient = torch.zeros_like(x[0])
    for index in reversed(range(config.depth)):
        for seed, direction in parts:
            if seed.block == index:
                share = seed.share(x[index + 1], config)
                row = row + share
                gradient = gradient + _of_part(model, x[index + 1], share, direction)
        row, gradient = _through(blocks_of(model)[index], x[index], row, gradient)
    return row


def _of_part(model: VisionTransformer, x: Tensor, share: Tensor, direction: Tensor) -> Tensor:
    """Return the gradient of a part of the transfer features along a direction with respect to
    tokens x [B, N, D].
    """
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        pooled = model.fc_norm((model.norm(leaf) * share.unsqueeze(2).to(leaf.dtype)).sum(dim=1))
        (gradient,) = torch.autograd.grad((pooled * direction).sum(), leaf)
    return gradient


def _through(
    block: Block, entering: Tensor, row: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the row and the gradient before a block, from those after it and the tokens that enter
    it.
    """
    with torch.enable_grad():
        leaf = entering.detach().requires_grad_()
        weighed = weigh(block, leaf)
        left = finish(block, leaf, weighed)
        to_weights, before = torch.autograd.grad(left, (weighed.weights, leaf), gradient)
    return row + (row.unsqueeze(1) @ _positive_mean(weighed.weights.detach(), to_weights)).squeeze(
        1
    ), before


def _last_row(model: VisionTransformer, x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row to begin with, float32 [B, N], and the logit's gradient with respect to the
    tokens x [B, N, D].
    """
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        if model.attn_pool is None:
            logits = model.read(leaf)
            (gradient,) = torch.autograd.grad(class_scores(logits, classes), leaf)
            return readout(model.config, x), gradient
        weighed = weigh_pool(model.attn_pool, model.norm(leaf))
        logits = finish_pool(model, model.attn_pool, weighed)
        to_weights, gradient = torch.autograd.grad(
            class_scores(logits, classes), (weighed.weights, leaf)
        )
    row = _positive_mean(weighed.weights.detach(), to_weights).squeeze(1)
    return over_all_tokens(row, model.config), gradient


def _positive_mean(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the mean over the heads of the positive part of gradient x attention: [B, heads, Q, N]
    -> [B, Q, N].
    """
    return (weights * gradient).relu().mean(dim=1)


def _with_rows(
    model: VisionTransformer, pixels: Tensor, rows: Tensor
) -> tuple[VisionTransformer, Tensor, Tensor]:
    """Return what `gae` takes for images that each have a class of its own: its row of another
    head, [B, D].
    """
    tensors: dict[int, Any] = {
        id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
    }
    twin = copy.deepcopy(model, tensors)  # its modules are its own, its tensors the model's
    twin.head = nn.Linear(rows.shape[1], len(rows), device=rows.device, dtype=pixels.dtype)
    with torch.no_grad():
        twin.head.weight.copy_(rows)
    if twin.head_dist is not None:  # the embedding is the mean of both tokens
        twin.head_dist = twin.head
    return twin, pixels, torch.arange(len(rows), device=rows.device)


def explain(
    model: VisionTransformer,
    pixels: Tensor,
    targets: Tensor,
    request: MapRequest,
    folded: FoldedWeights | None = None,
    features: Pooling = "head",
) -> tuple[Tensor, Tensor]:
    """Return a map for each image, of its class where the method is class-specific.

    Args:
        pixels: [B, C, H, W], normalised, in the model's dtype.
        targets: the classes, int64 [B], or by `gae` another head's rows of them, float32 [B, D].
            They count, and not the request's.
        request: of a method in `EXPLANATIONS`.
        folded: `fold` of the model; None folds the weights for this call.
        features: what the head of the targets reads, where they are rows.

    Returns:
        float32 [B, rows, columns] on the CPU, not negative, each map summing to 1; where a method
        finds nothing, the map is even. And float32 [B], the share that fell on patches and not on
        prefix tokens.
    """
    config = model.config
    images = max(1, _WEIGHTS_BYTES // (4 * config.heads * config.tokens**2))
    parts = zip(torch.split(pixels, images), torch.split(targets, images), strict=True)

    def tokens_of(part: Tensor, each: Tensor) -> Tensor:
        if request.method == "rollout":
            return rollout(model, part)
        if request.method == "gae" and features == "transfer":
            return gae_of_transfer(model, part, each)
        if request.method == "gae":
            return gae(
                *(
                    _with_rows(model, part, each)
                    if each.is_floating_point()
                    else (model, part, each)
                )
            )
        return token_relevance(
            model, model(part, keep=kept_blocks(config)), folded or fold(model), each
        )

    with torch.no_grad():
        tokens = torch.cat([tokens_of(*part) for part in parts]).float().cpu().numpy()
    # Relevance may be negative.
    maps, mass = (sharpened_maps if request.method == "relevance" else token_maps)(tokens, config)
    return torch.from_numpy(maps), torch.from_numpy(mass)
