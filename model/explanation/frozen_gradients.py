"""Gradients through a model's last steps, with what scales a token's features held constant.

A LayerNorm divides by the token's standard deviation and an activation multiplies each feature by a gate, the share of
it that is let through. Their own gradients are noise to an explanation: with both held constant every step is linear
in the tokens, and gradient x input adds up to the score up to what biases give (Mehri et al., CVPR 2025, "LibraGrad",
https://arxiv.org/abs/2411.16760). All functions are plain forward operations, so that they compile and export.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.network.layers.block import LayerScale, Mlp, SwiGLU
from model.network.vit import VisionTransformer

_RIVALS: Final = 10


def through_linear(layer: nn.Linear, gradient: Tensor, rows: slice = slice(None)) -> Tensor:
    """Return the gradient [..., in] with respect to the input, in float32, from that of these rows of the output."""
    weight = layer.weight[rows]
    return (gradient.to(weight.dtype) @ weight).float()


def through_projection(layer: nn.Linear, gradient: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient [B, Q, D] by head of the layer's input, and what it gives to an offset of the values.

    Both come from one product. Its weight is not square: OpenVINO takes such a one for its transpose where the layer
    itself is in the same graph.

    Args:
        offset: float32 [heads, head_dim].

    Returns:
        float32 [B, heads, Q, head_dim] and [B, heads, Q, 1].
    """
    weight, (width, _), (heads, head_dim) = layer.weight, layer.weight.shape, offset.shape
    of_offset = (weight.reshape(width, heads, head_dim) * offset.to(weight.dtype)).sum(dim=2)  # [D, heads]
    found = (gradient.to(weight.dtype) @ torch.cat((weight, of_offset), dim=1)).float()
    by_head = found[:, :, :width].reshape(*gradient.shape[:2], heads, head_dim).transpose(1, 2)
    return by_head, found[:, :, width:].transpose(1, 2).unsqueeze(3)


def through_scale(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to the input of a `LayerScale`, or of nothing."""
    return gradient * layer.gamma.float() if isinstance(layer, LayerScale) else gradient


def through_norm(layer: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to the input x [..., D] of a LayerNorm, or of nothing, from its output's."""
    if not isinstance(layer, nn.LayerNorm):
        return gradient
    scale = (x.float().var(dim=-1, keepdim=True, unbiased=False) + layer.eps).rsqrt()
    return through_norm_of_one(layer, gradient) * scale


def through_norm_of_one(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Return `through_norm` but for its scale, which does not matter for one token that all relevance goes through."""
    if not isinstance(layer, nn.LayerNorm):
        return gradient
    gradient = gradient * layer.weight.float()
    return gradient - gradient.mean(dim=-1, keepdim=True)


def through_mlp(mlp: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to the input x [..., D] of an MLP from its output's; `SwiGLU` gates too."""
    if not isinstance(mlp, Mlp | SwiGLU):
        raise TypeError(f"no gradient is known of {type(mlp).__name__}")
    gradient = through_linear(mlp.fc2, gradient)
    if isinstance(mlp, SwiGLU):
        gate, _ = mlp.fc1(x).chunk(2, dim=-1)
        return through_linear(mlp.fc1, gradient * mlp.activation(gate).float(), slice(gate.shape[-1], None))
    hidden = mlp.fc1(x).float()
    gates = torch.where(hidden == 0, 0.0, mlp.activation(hidden) / hidden)
    return through_linear(mlp.fc1, gradient * gates)


def with_rivals(logits: Tensor, classes: Tensor | None) -> Tensor:
    """Return each image's class and after it the ten strongest others: int64 [B, 11].

    A model of fewer classes has fewer rivals, one of a single class none.

    Args:
        logits: [B, num_classes].
        classes: int64 [B]; None is the best one of each image.
    """
    logits = logits.float()
    if classes is not None:
        logits = logits.scatter(1, classes.unsqueeze(1), torch.inf)
    count = min(_RIVALS + 1, int(logits.shape[1]))  # in a trace a size is a tensor
    return logits.topk(count, dim=1).indices


def through_lead(layer: nn.Linear, ranked: Tensor) -> Tensor:
    """Return the gradient, float32 [B, in], of a class's lead in this layer: its logit less its rivals' mean.

    The logit alone also rises with what all likely classes have in common, an animal or a vehicle of any kind; against
    the mean of the strongest rivals this cancels out.

    Args:
        ranked: see `with_rivals`.
    """
    rows = layer.weight[ranked].float()  # [B, 1 + rivals, in]
    return rows[:, 0] - rows[:, 1:].mean(dim=1) if ranked.shape[1] > 1 else rows[:, 0]


def through_head(model: VisionTransformer, ranked: Tensor) -> Tensor:
    """Return the gradient of the lead with respect to the pooled tokens, [B, D] or [B, 2 D], before `fc_norm`."""
    return through_norm_of_one(model.fc_norm, through_lead(model.head, ranked))


def through_pooling(x: Tensor, gradient: Tensor, config: ViTConfig) -> Tensor:
    """Return the gradient with respect to the tokens x, [B, N, D], of those that are pooled by a rule but `cls`.

    Args:
        gradient: with respect to the pooled vector, float32 [B, D], or [B, 2 D] with `cls_mean`.
    """
    skipped = 0 if config.pool_prefix else config.prefix_tokens
    pooled = x[:, skipped:].float()
    gradient = gradient.unsqueeze(1)
    to_cls = gradient[..., : x.shape[2]]
    mean = gradient[..., -x.shape[2] :].expand_as(pooled) / pooled.shape[1]
    highest = (pooled == pooled.amax(dim=1, keepdim=True)).float()
    most = gradient * highest / highest.sum(dim=1, keepdim=True) if config.pool in ("max", "mean_max") else mean
    shares = {"max": most, "mean_max": (most + mean) / 2}.get(config.pool, mean)
    found = nn.functional.pad(shares, (0, 0, skipped, 0))
    return torch.cat((found[:, :1] + to_cls, found[:, 1:]), dim=1) if config.pool == "cls_mean" else found
