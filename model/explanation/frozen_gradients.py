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


def through_projection(layer: nn.Linear, gradient: Tensor, heads: int) -> Tensor:
    """Return `through_linear` by head: [B, Q, D] -> [B, heads, Q, head_dim].

    The weight is square. OpenVINO takes such a one for its transpose where the layer itself is in the same graph, so
    that it is split by head first, which makes it another constant.
    """
    weight = layer.weight.reshape(len(layer.weight), heads, -1).permute(1, 0, 2)
    by_head: Tensor = gradient.to(weight.dtype).unsqueeze(1) @ weight
    return by_head.float()


def through_scale(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to the input of a `LayerScale`, or of nothing."""
    return gradient * layer.gamma.float() if isinstance(layer, LayerScale) else gradient


def through_norm(layer: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to the input x [..., D] of a LayerNorm, or of nothing, from its output's."""
    if not isinstance(layer, nn.LayerNorm):
        return gradient
    gradient = gradient * layer.weight.float()
    gradient = gradient - gradient.mean(dim=-1, keepdim=True)
    return gradient * (x.float().var(dim=-1, keepdim=True, unbiased=False) + layer.eps).rsqrt()


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


def lead_gradient(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the gradient, float32 [B, num_classes], of each class's lead: its logit less its ten rivals' mean.

    The logit alone also rises with what all likely classes have in common, an animal or a vehicle of any kind; against
    the mean of the strongest rivals this cancels out. A model of fewer classes has fewer rivals, one of a single class
    none.

    Args:
        logits: [B, num_classes].
        classes: int64 [B].
    """
    own = classes.unsqueeze(1)
    zeros = torch.zeros_like(logits, dtype=torch.float32)
    rivals = min(_RIVALS, int(logits.shape[1]) - 1)  # in a trace a size is a tensor
    if rivals:
        best = logits.float().scatter(1, own, -torch.inf).topk(rivals, dim=1).indices
        zeros = zeros.scatter(1, best, -1 / rivals)
    return zeros.scatter(1, own, 1.0)


def through_head(model: VisionTransformer, pooled: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    """Return the gradient of the lead with respect to the pooled tokens, [B, D] or [B, 2 D], before `fc_norm`."""
    gradient = through_linear(model.head, lead_gradient(logits, classes))
    return through_norm(model.fc_norm, pooled, gradient)


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
