"""PatchDropout: a model is trained on a random choice of the patches of each image.

Liu et al. 2022, https://arxiv.org/abs/2208.07220; timm's `timm/layers/patch_dropout.py`.
"""

import torch
from torch import Tensor, nn

from model.network.vit import VisionTransformer


class PatchDropper:
    """Drops patches of a model in training, drawn anew for each image and pass.

    Args:
        model: the network; its tokens pass a hook after the embedding.

    Attributes:
        rate: share of the patches to drop; may change between passes.
    """

    def __init__(self, model: VisionTransformer) -> None:
        self.rate = 0.0
        self._prefix_tokens = model.config.prefix_tokens
        model.norm_pre.register_forward_hook(self._drop)  # the embedding's last step

    def _drop(self, module: nn.Module, _: object, x: Tensor) -> Tensor:
        if not (module.training and self.rate):
            return x
        return drop_patches(x, self.rate, self._prefix_tokens)


def drop_patches(x: Tensor, rate: float, prefix_tokens: int) -> Tensor:
    """Keep all prefix tokens and, per image, a random choice of the patches in their order.

    Args:
        x: [B, prefix_tokens + P, D], with positions.
        rate: share of the patches to drop, 0 <= rate < 1; at least one is kept.

    Returns:
        [B, prefix_tokens + max(1, round(P (1 - rate))), D].
    """
    batch, tokens, width = x.shape
    patches = tokens - prefix_tokens
    keep = max(1, round(patches * (1 - rate)))
    if keep == patches:
        return x
    shuffled = torch.rand((batch, patches), device=x.device).argsort(dim=1)
    indices = shuffled[:, :keep].sort(dim=1).values
    kept = x[:, prefix_tokens:].gather(1, indices[:, :, None].expand(-1, -1, width))
    return torch.cat((x[:, :prefix_tokens], kept), dim=1)
