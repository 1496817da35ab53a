"""Images on which a network is tried, and the comparison of two ways of computing it."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig
from model.errors import DeviceError
from model.outputs import RIVALS
from model.runtime.backend import HostOutputs

# Largest norm of the difference between two ways of computing an image's output, relative to the
# output's norm: in float32, and in dtypes of fewer bits. A way that lost a layer is off by about
# the norm itself. ViT-Ti/16 in bfloat16 is off by 0.01. Its relevance, a difference of large
# numbers, is off by 0.1, and by 0.26 for one of 128 images of noise.
_TOLERANCES: Final = {
    "logits": (1e-3, 0.1),
    "attention": (0.01, 0.3),
    "relevance": (0.05, 0.9),
    "transfer": (1e-3, 0.1),
}


def require_close(outputs: HostOutputs, expected: HostOutputs, *, exact: bool, source: str) -> None:
    """Check the network's outputs for each image of a batch against torch's own.

    This finds networks that compute something else: a lost layer, a wrong weight, a graph that does
    nothing, images in another order. It does not bound rounding. Kernels of other launch sizes
    round differently, and in bfloat16 that moves relevance far more than logits.

    Relevance explains the best class's margin over its rivals. If rounding changes the rivals, the
    relevance explains another margin and is not compared.

    Args:
        outputs: outputs of `source`, on the host.
        expected: torch's outputs for the same images and perhaps more, on the host.
        exact: whether both were computed in float32.
        source: name of the network in the message.

    Raises:
        DeviceError: an output in `_TOLERANCES` is too far from torch's.
    """
    count = len(outputs["logits"])
    margins = _classes_of_margin(outputs["logits"])
    same_margin = (margins == _classes_of_margin(expected["logits"][:count])).all(axis=1)
    for name in _TOLERANCES.keys() & outputs.keys() & expected.keys():
        reference = expected[name][:count].reshape(count, -1)
        distances = np.linalg.norm(outputs[name].reshape(count, -1) - reference, axis=1)
        # A head of zeros gives zeros in both, hence the smallest norm.
        relative = distances / np.maximum(np.linalg.norm(reference, axis=1), 1e-6)
        if name == "relevance":
            relative = relative[same_margin]
        worst = float(relative.max(initial=0.0))
        # Written so that NaN fails, too.
        if not worst <= _TOLERANCES[name][not exact]:
            raise DeviceError(
                f"{source}'s {name} of an image are {worst:.2g} of their norm away from torch's"
            )


def _classes_of_margin(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the best class of logits [B, C], followed by its rivals in ascending order."""
    ranked = np.argsort(-logits, axis=1, kind="stable")[:, : RIVALS + 1]
    return np.concatenate((ranked[:, :1], np.sort(ranked[:, 1:], axis=1)), axis=1)


def noise_images(count: int, shape: Sequence[int], seed: int = 0) -> NDArray[np.uint8]:
    """Return images of noise, uint8 [count, H, W, C], the same for each seed.

    Outputs are compared on them: on black and white images, the outputs of bfloat16 are eight times
    as far from float32's as on noise and pictures.

    Args:
        count: number of images.
        shape: (H, W, C).
        seed: seed of the noise.
    """
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def trial_images(config: NetworkConfig, count: int, turn: int = 0) -> NDArray[np.uint8]:
    """Return images [count, H, W, C] of noise, black and white in turn.

    No kind replaces the others: if black normalises to 0, its output does not depend on the
    weights.

    Args:
        config: the model's, with the size of the images.
        count: number of images.
        turn: kind of the first image: 0 noise, 1 white, 2 black.
    """
    images = noise_images(count, (*config.image_size, config.in_channels))
    images[(turn + 1) % 3 :: 3] = 0
    images[(turn + 2) % 3 :: 3] = 255
    return images
