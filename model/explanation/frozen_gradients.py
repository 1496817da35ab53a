"""Gradients through a model's last steps, with what scales a token's features held constant.

A LayerNorm divides by the token's standard deviation and an activation multiplies each feature by a
gate, the share of it that is let through. Their own gradients are noise to an explanation: with
both held constant every step is linear in the tokens (Mehri et al., CVPR 2025, "LibraGrad",
https://arxiv.org/abs/2411.16760). All functions are plain forward operations, so that they compile
and export.
"""

from typing import Final

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.network.layers.block import LayerScale, Mlp, SwiGLU

# Added to hidden values against a division by zero: less than they are rounded to.
_NOT_ZERO: Final = 1e-30


def is_traced() -> bool:
    """Return whether the operations are being traced, for OpenVINO."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def through_linear(layer: nn.Linear, gradient: Tensor, rows: slice = slice(None)) -> Tensor:
    """Return the gradient [..., in] with respect to the input, in float32, from that of these rows
    of the output.
    """
    weight = layer.weight[rows]
    return (gradient.to(weight.dtype) @ weight).float()


def through_scale(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to the input of a `LayerScale`, or of nothing."""
    return gradient * layer.gamma.float() if isinstance(layer, LayerScale) else gradient


def through_mlp(mlp: Mlp | SwiGLU, hidden: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to the input of an MLP from its output's; `SwiGLU` gates
    too.

    Args:
        hidden: what the first layer gave, [..., mlp_width], or twice as wide for `SwiGLU`.
    """
    gradient = through_linear(mlp.fc2, gradient)
    if isinstance(mlp, SwiGLU):
        gate, value = hidden.chunk(2, dim=-1)
        let_through = mlp.activation(gate)
        gradient = through_norm(mlp.norm, let_through * value, gradient)
        return through_linear(mlp.fc1, gradient * let_through.float(), slice(gate.shape[-1], None))
    hidden = hidden.float() + _NOT_ZERO
    activated = mlp.activation(hidden)
    return through_linear(
        mlp.fc1, through_norm(mlp.norm, activated, gradient) * (activated / hidden)
    )


def through_norm(layer: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to the input x [..., D] of a LayerNorm, or of nothing, from
    its output's.
    """
    if not isinstance(layer, nn.LayerNorm):
        return gradient
    return through_norm_unscaled(layer, gradient) * inverse_deviation(layer, x)


def inverse_deviation(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """Return the reciprocal of each token's standard deviation, as a LayerNorm takes it: float32
    [..., 1].
    """
    x = x.float()
    if is_traced():
        return (x.var(dim=-1, keepdim=True, unbiased=False) + layer.eps).rsqrt()
    # The norm's kernel takes a tenth of the time of the variance's, on a CPU; a trace for OpenVINO
    # may not hold it.
    return torch.native_layer_norm(x, (x.shape[-1],), None, None, layer.eps)[2]


def through_norm_unscaled(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Return `through_norm` but for its scale, which does not matter for a token that all relevance
    goes through.
    """
    if not isinstance(layer, nn.LayerNorm):
        return gradient
    gradient = gradient * layer.weight.float()
    return gradient - gradient.mean(dim=-1, keepdim=True)


def with_rivals(logits: Tensor, classes: Tensor | None, count: int) -> Tensor:
    """Return each image's class and after it the strongest others: int64 [B, count].

    Args:
        logits: [B, num_classes].
        classes: int64 [B]; None is the best of each image, of equal ones the first, as in
        `Head.best`.
    """
    logits = logits.float()
    if classes is None:
        classes = logits.argmax(
            dim=1
        )  # what `topk` puts first of equal ones is left open, and bfloat16 has many
    return logits.scatter(1, classes.unsqueeze(1), torch.inf).topk(count, dim=1).indices


def through_pooling(x: Tensor, gradient: Tensor, config: ViTConfig) -> Tensor:
    """Return the gradient with respect to the tokens x, [B, N, D], of those that are pooled by a
    rule but `cls`.

    Args:
        gradient: with respect to the pooled vector, float32 [B, 1, D], or [B, 1, 2 D] with
        `cls_mean`.
    """
    skipped = 0 if config.pool_prefix else config.prefix_tokens
    pooled = x[:, skipped:].float()
    to_cls = gradient[..., : x.shape[2]]
    mean = gradient[..., -x.shape[2] :].expand_as(pooled) / pooled.shape[1]
    highest = (pooled == pooled.amax(dim=1, keepdim=True)).float()
    most = (
        gradient * highest / highest.sum(dim=1, keepdim=True)
        if config.pool in ("max", "mean_max")
        else mean
    )
    shares = {"max": most, "mean_max": (most + mean) / 2}.get(config.pool, mean)
    to_tokens = nn.functional.pad(shares, (0, 0, skipped, 0))
    if config.pool == "cls_mean":
        return torch.cat((to_tokens[:, :1] + to_cls, to_tokens[:, 1:]), dim=1)
    return to_tokens
