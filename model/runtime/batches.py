"""Batches of any size, computed in pieces of few sizes.

The libraries that run a network on the CPU (oneDNN, within torch and OpenVINO) make kernels for each batch size that
they meet, and keep them: 2 MiB a size and stream in OpenVINO, 8 MiB a size in torch with bfloat16, for a network of
1.9 million parameters. If every size up to the largest were launched, a service would grow for as long as it meets new
sizes, which are rare ones in the end. A batch of more than 8 images is therefore cut. A further launch costs about as
much as one image, where padding to the next size would cost up to half of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from model.runtime.postprocess import NetworkOutput

UNCUT: Final = 8
"""Images in the largest batch that is always computed in one piece."""


def piece_sizes(count: int, sizes: Sequence[int] | None = None) -> list[int]:
    """Return the sizes of the pieces of a batch, in the order of its images; most often one or two.

    A piece has 1 ... 8 images, or a power of two, or one and a half times that: 12 is left out, as 8 and 4 are sizes.

    Args:
        sizes: that a piece may have instead of these, with 1 among them; None for these.
    """
    found = []
    if sizes is not None:
        while count:
            found.append(max(size for size in sizes if size <= count))
            count -= found[-1]
        return found
    while count > UNCUT:
        power = 1 << (count.bit_length() - 1)
        largest = power * 3 // 2 if power > UNCUT and count >= power * 3 // 2 else power
        found.append(largest)
        count -= largest
    return [*found, count] if count else found


def sizes_in_use(max_batch: int) -> list[int]:
    """Return every size that a piece of a batch of 1 ... `max_batch` images can have, descending."""
    return [size for size in range(max_batch, 0, -1) if piece_sizes(size) == [size]]


def compute_in_pieces(
    images: NDArray[np.uint8],
    compute: Callable[[NDArray[np.uint8]], NetworkOutput],
    sizes: Sequence[int] | None = None,
) -> NetworkOutput:
    """Compute each piece (see `piece_sizes`) of a batch [B, H, W, C], and return their outputs as one."""
    cut = piece_sizes(len(images), sizes)
    if len(cut) == 1:
        return compute(images)
    parts = zip(*(compute(piece) for piece in np.split(images, np.cumsum(cut)[:-1])), strict=True)
    logits, attention, relevance = (None if part[0] is None else torch.cat(part) for part in parts)
    assert logits is not None
    return NetworkOutput(logits, attention, relevance)


def launch_size(count: int, sizes: tuple[int, ...] | None) -> int:
    """Return the smallest of the ascending sizes that holds `count` images; `count` itself when sizes are None."""
    return count if sizes is None else next(size for size in sizes if size >= count)


def captured_sizes(largest: int) -> tuple[int, ...]:
    """Return the batch sizes that become CUDA graphs: powers of two up to 16, then four to an octave, and the largest.

    Padding is at most a quarter beyond 32 images; the fewer they are, the less the device's time depends on them.
    """
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < largest:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(8, octave // 4))
    return (*(size for size in sizes if size < largest), largest)


def powers_of_two(largest: int) -> tuple[int, ...]:
    """Return the batch sizes 1, 2, 4, ... that are below the largest, and the largest."""
    return (*(1 << power for power in range((largest - 1).bit_length())), largest)
