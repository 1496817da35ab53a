"""The training and validation tensors of a run, and an epoch's augmented batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ViTConfig
from model.training.augment.augment import augment, random_erasing
from model.training.augment.mixing import mix
from model.training.recipe import Recipe

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class TrainingData:
    """Training and validation images on the training device, or on the CPU, in memory or mapped from a file.

    Attributes:
        pixels: uint8 [N, C, H, W], not smaller than the model's input unless the recipe resizes crops.
        labels: int64 [N].
        validation_pixels: uint8 [M, C, H, W] of the size of the model's input.
        validation_labels: int64 [M].
        mean, std: of each channel of the training images, scaled to 0...1.
    """

    pixels: Tensor
    labels: Tensor
    validation_pixels: Tensor
    validation_labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return uint8 [B, C, H, W] as float32, normalised as the service will do it."""
        mean = torch.tensor(self.mean, device=pixels.device).reshape(1, -1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).reshape(1, -1, 1, 1)
        return (pixels.float() / 255 - mean) / std


def augmented_batches(
    data: TrainingData, recipe: Recipe, config: ViTConfig, generator: torch.Generator, progress: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield an epoch's augmented batches on the generator's device; the last, smaller batch is left out.

    Args:
        generator: source of all that is random; on the training device.
        progress: share of the schedule that is done when the epoch begins.

    Yields:
        Normalised pixels, float32 [B, C, H, W]; their own labels, int64 [B]; and the targets of the loss:
        the same labels, or float32 [B, num_classes] where images are mixed.
    """
    augmentation, mixing = recipe.augmentation, recipe.mixing
    order = torch.randperm(len(data.labels), generator=generator, device=generator.device)
    indices = order.to(data.pixels.device)
    batches = torch.split(indices, recipe.batch_size)[: len(indices) // recipe.batch_size]
    for stored, labels in _stored_batches(data, batches, generator.device):
        pixels = data.normalise(augment(stored, config.image_size, augmentation, generator, progress))
        pixels = random_erasing(pixels, augmentation.erasing, augmentation.erasing_fill, generator)
        targets = labels
        if (mixing.mixup or mixing.cutmix) and progress < mixing.until:
            targets = F.one_hot(labels, config.num_classes).float()
            pixels, targets = mix(pixels, targets, mixing, generator)
        yield pixels, labels, targets


def _stored_batches(
    data: TrainingData, batches: tuple[Tensor, ...], device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield stored pixels and labels by batches of indices, on `device`; from another device they are read ahead."""

    def read(batch: Tensor) -> tuple[Tensor, Tensor]:
        return data.pixels[batch], data.labels[batch]

    def read_pinned(batch: Tensor) -> tuple[Tensor, Tensor]:
        pixels, labels = read(batch)
        return pixels.pin_memory(), labels.pin_memory()

    if data.pixels.device.type == device.type:
        yield from map(read, batches)
        return
    for pixels, labels in read_ahead(read_pinned if device.type == "cuda" else read, batches):
        yield pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def read_ahead(read: Callable[[Key], Value], keys: Iterable[Key]) -> Iterator[Value]:
    """Yield `read(key)` of each key; a thread reads the next item while the present one is used.

    Raises:
        Exception: whatever `read` raises, in place of its item.
    """
    with ThreadPoolExecutor(1) as reader:
        following = None
        for key in keys:
            present, following = following, reader.submit(read, key)
            if present is not None:
                yield present.result()
        if following is not None:
            yield following.result()
