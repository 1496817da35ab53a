"""Transfer features: the input of classifiers with other labels.

The last block of a network trained with labels keeps mainly the differences between its own
classes. Earlier blocks and the patches keep more, so classifiers with other labels read these too.
The linear evaluation of DINOv2 does the same (Oquab et al. 2023, https://arxiv.org/abs/2304.07193,
appendix B.3).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ViTConfig
from model.outputs import TRANSFER_BLOCKS


class TransferPart(NamedTuple):
    """A part of the transfer features, as wide as a token.

    Attributes:
        block: index of the block after which it is read.
        is_token: whether it is the CLS token instead of the mean of the patches.
    """

    block: int
    is_token: bool

    def share(self, x: Tensor, config: ViTConfig) -> Tensor:
        """Return the share of each token x [B, N, D] in this part, float32 [B, N]."""
        tokens = torch.arange(config.tokens, device=x.device)
        if self.is_token:
            shares = (tokens == 0).float()
        else:
            shares = (tokens >= config.prefix_tokens) / (config.tokens - config.prefix_tokens)
        return shares.expand(x.shape[0], -1)


def transfer_parts(config: ViTConfig) -> list[TransferPart]:
    """Return the parts of the transfer features in their order."""
    read = range(config.depth)[-TRANSFER_BLOCKS:]
    parts = [TransferPart(block, config.class_token) for block in read]
    if config.class_token:
        parts.append(TransferPart(config.depth - 1, False))
    return parts


def transfer_features(
    outputs: Sequence[Tensor],
    config: ViTConfig,
    norm: Callable[[Tensor], Tensor],
    pooled_norm: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the transfer features of images, in the dtype of the outputs.

    They are the CLS token after each of the last `TRANSFER_BLOCKS` blocks, the earliest first, and
    then the mean of the last block's patch tokens: [B, 4 D]. Without a CLS token, they are the
    means of the patch tokens after each of these blocks: [B, 3 D]. Every part is taken after the
    final norm.

    Args:
        outputs: of these blocks, the earliest first, [B, N, D]; all but the last may be only the
            CLS token.
        config: the architecture.
        norm: the final norm of tokens, [B, N, D].
        pooled_norm: the final norm of pooled tokens, [B, D]. One of the two norms is the identity.

    Returns:
        [B, `embedding_width(config, "transfer")`].
    """
    if not config.class_token:
        means = [norm(output)[:, config.prefix_tokens :].mean(dim=1) for output in outputs]
        return torch.cat([pooled_norm(mean) for mean in means], dim=1)
    normed = norm(outputs[-1])
    tokens = [pooled_norm(norm(output[:, :1])[:, 0]) for output in outputs[:-1]]
    patches = normed[:, config.prefix_tokens :].mean(dim=1)
    return torch.cat((*tokens, pooled_norm(normed[:, 0]), pooled_norm(patches)), dim=1)
