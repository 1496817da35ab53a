"""Gradients through a model's last steps, with the scale of each token's features held constant.

A LayerNorm divides by the token's standard deviation. An activation multiplies each feature by a
gate, the ratio of its output to its input. The gradients of these factors are noise in an
explanation. With both held constant, every step is linear in the tokens (Mehri et al., CVPR 2025,
"LibraGrad", https://arxiv.org/abs/2411.16760). All functions are plain forward operations, so that
they compile and export.
"""

from typing import Final

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.network.layers.block import LayerScale, Mlp, SwiGLU

# Added to hidden values to avoid a division by zero; smaller than their rounding error.
_NOT_ZERO: Final = 1e-30


def is_traced() -> bool:
    """Return whether the operations are being traced for OpenVINO."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def through_linear(layer: nn.Linear, gradient: Tensor, rows: slice = slice(None)) -> Tensor:
    """Return the gradient [..., in] in float32 for a linear layer's input.

    Args:
        gradient: for these rows of the output, [..., rows].
    """
    weight = layer.weight[rows]
    return (gradient.to(weight.dtype) @ weight).float()


def through_scale(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Return the gradient for the input of a `LayerScale` or an identity."""
    return gradient * layer.gamma.float() if isinstance(layer, LayerScale) else gradient


def through_mlp(mlp: Mlp | SwiGLU, hidden: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient for the input of an MLP from the gradient for its output.

    Args:
        hidden: output of the first layer, [..., mlp_width], or twice as wide for `SwiGLU`.
    """
    gradient = through_linear(mlp.fc2, gradient)
    if isinstance(mlp, SwiGLU):
        gate, value = hidden.chunk(2, dim=-1)
        opened = mlp.activation(gate)
        gradient = through_norm(mlp.norm, opened * value, gradient)
        return through_linear(mlp.fc1, gradient * opened.float(), slice(gate.shape[-1], None))
    hidden = hidden.float() + _NOT_ZERO
    activated = mlp.activation(hidden)
    gradient = through_norm(mlp.norm, activated, gradient)
    return through_linear(mlp.fc1, gradient * (activated / hidden))


def through_norm(layer: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient for the input x [..., D] of a LayerNorm or an identity."""
    if not isinstance(layer, nn.LayerNorm):
        return gradient
    return through_norm_unscaled(layer, gradient) * inverse_deviation(layer, x)


def inverse_deviation(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """Return 1 / each token's standard deviation as in a LayerNorm: float32 [..., 1]."""
    x = x.float()
    if is_traced():
        return (x.var(dim=-1, keepdim=True, unbiased=False) + layer.eps).rsqrt()
    # On a CPU, the norm's kernel takes a tenth of the time of the variance's. A trace for OpenVINO
    # must not contain it.
    return torch.native_layer_norm(x, (x.shape[-1],), None, None, layer.eps)[2]


def through_norm_unscaled(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Return `through_norm` without its scale per token.

    That scale has no effect if all relevance passes through one token.
    """
    if not isinstance(layer, nn.LayerNorm):
        return gradient
    gradient = gradient * layer.weight.float()
    return gradient - gradient.mean(dim=-1, keepdim=True)


def with_rivals(logits: Tensor, classes: Tensor | None, count: int) -> Tensor:
    """Return each image's class followed by its strongest rivals: int64 [B, count].

    Args:
        logits: [B, num_classes].
        classes: int64 [B]; None takes the best class of each image, and the first of several equal
            ones, like `Head.best_classes`.
    """
    logits = logits.float()
    if classes is None:
        # `topk` leaves the order of equal logits open, and bfloat16 has many equal logits.
        classes = logits.argmax(dim=1)
    return logits.scatter(1, classes.unsqueeze(1), torch.inf).topk(count, dim=1).indices


def through_pooling(x: Tensor, gradient: Tensor, config: ViTConfig) -> Tensor:
    """Return the gradient for the tokens x, [B, N, D], of a pooling rule other than `cls`.

    Args:
        gradient: for the pooled vector, float32 [B, 1, D], or [B, 1, 2 D] with `cls_mean`.
    """
    skipped = 0 if config.pool_prefix else config.prefix_tokens
    pooled = x[:, skipped:].float()
    to_cls = gradient[..., : x.shape[2]]
    mean = gradient[..., -x.shape[2] :].expand_as(pooled) / pooled.shape[1]
    shares = mean
    if config.pool in ("max", "mean_max"):
        highest = (pooled == pooled.amax(dim=1, keepdim=True)).float()
        most = gradient * highest / highest.sum(dim=1, keepdim=True)
        shares = most if config.pool == "max" else (most + mean) / 2
    to_tokens = nn.functional.pad(shares, (0, 0, skipped, 0))
    if config.pool == "cls_mean":
        return torch.cat((to_tokens[:, :1] + to_cls, to_tokens[:, 1:]), dim=1)
    return to_tokens
