"""The pictures of a run, and an epoch's augmented batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.config import Size
from model.data.pictures import Images
from model.runtime.device import choose_dtype
from model.training.augment import augment
from model.training.recipe import Augmentation

_VALIDATION_PIXELS = 500 * 32 * 32
"""Bounds a validation batch of large images, and so its memory."""

Item = TypeVar("Item")
Read = TypeVar("Read")


class Arithmetic:
    """The device that a run computes on, and its dtype of activations and gradients; weights are float32."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self.device, self.dtype = device, choose_dtype(precision, device)
        if self.dtype == torch.float16:  # would need loss scaling; only devices older than 2020 get here
            self.dtype = torch.float32
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)


@dataclass(frozen=True)
class TrainingData:
    """Training and validation images, in memory or mapped from a file.

    Attributes:
        train: not smaller than the model's input unless the recipe resizes crops.
        validation: of the size of the model's input.
        mean, std: of each channel of the training images, scaled to 0...1.
    """

    train: Images
    validation: Images
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def size(self) -> Size:
        """Return (rows, columns) of the model's input."""
        return self.validation.pixels.shape[2], self.validation.pixels.shape[3]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return uint8 [B, C, H, W] as float32, normalised as the service will do it."""
        mean = torch.tensor(self.mean, device=pixels.device).reshape(1, -1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).reshape(1, -1, 1, 1)
        return (pixels.float() / 255 - mean) / std

    def epoch(
        self, batch_size: int, settings: Augmentation, generator: np.random.Generator
    ) -> Iterator[tuple[NDArray[np.int64], Tensor, Tensor]]:
        """Yield an epoch's batches, each augmented while the one before it is used; a last, smaller one is left out.

        Yields:
            Indices of training images, int64 [B]; their pixels, uint8 [B, C, rows, columns]; their labels, int64 [B].
        """
        order = generator.permutation(len(self.train))
        batches = order[: len(order) - len(order) % batch_size].reshape(-1, batch_size)

        def read(indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], Tensor, Tensor]:
            pixels = augment(self.train.pixels[indices], self.size, settings, generator)
            return indices, torch.from_numpy(pixels), torch.from_numpy(self.train.labels[indices])

        return read_ahead(read, batches)

    def validation_batches(self) -> Iterator[Tensor]:
        """Yield the validation images, uint8 [B, C, rows, columns], in order."""
        batch = max(1, _VALIDATION_PIXELS // (self.size[0] * self.size[1]))
        for start in range(0, len(self.validation), batch):
            yield torch.from_numpy(self.validation.pixels[start : start + batch])


def read_ahead(read: Callable[[Item], Read], items: Iterable[Item]) -> Iterator[Read]:
    """Yield `read(item)` of each item; a thread reads the next one while the present one is used.

    Raises:
        Exception: whatever `read` raises, in place of its item.
    """
    with ThreadPoolExecutor(1) as reader:
        following = None
        for item in items:
            present, following = following, reader.submit(read, item)
            if present is not None:
                yield present.result()
        if following is not None:
            yield following.result()
