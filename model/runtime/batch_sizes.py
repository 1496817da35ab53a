"""Sizes of batches: captured graphs on CUDA, and pieces of a batch on a CPU.

No torch is needed.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.runtime.backend import HostOutputs

# Sizes that networks are compiled for on a CPU. Larger batches take as long per image.
SIZES: Final = (1, 2, 4, 8)


def pieces(images: NDArray[np.uint8], sizes: Sequence[int] = SIZES) -> list[NDArray[np.uint8]]:
    """Cut a batch [B, H, W, C] into pieces of these sizes, the largest first; 1 must be a size."""
    ends = [0]
    while ends[-1] < len(images):
        ends.append(ends[-1] + max(size for size in sizes if size <= len(images) - ends[-1]))
    return np.split(images, ends[1:-1])


def compute_in_pieces(
    images: NDArray[np.uint8],
    compute: Callable[[NDArray[np.uint8]], HostOutputs],
    sizes: Sequence[int] = SIZES,
) -> HostOutputs:
    """Compute the pieces of a batch [B, H, W, C] and join their outputs."""
    return joined([compute(piece) for piece in pieces(images, sizes)])


def joined(parts: Sequence[HostOutputs]) -> HostOutputs:
    """Join the outputs of a batch's pieces."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def launch_size(count: int, sizes: tuple[int, ...] | None) -> int:
    """Return the smallest of the ascending sizes that holds `count` images; None allows any."""
    if sizes is None:
        return count
    return next(size for size in sizes if size >= count)


def captured_sizes(largest: int) -> tuple[int, ...]:
    """Return the batch sizes that become CUDA graphs.

    They are 2, 4, 8, 16, 24, 32, then four per octave, and the largest. Beyond 32 images, padding
    is at most a quarter; with fewer images, the device's time depends less on their number. A
    single image is launched as two, because compiled code needs at least two.
    """
    sizes = [2, 4, 8, 16]
    while sizes[-1] < largest:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(8, octave // 4))
    return (*(size for size in sizes if size < largest), largest)
