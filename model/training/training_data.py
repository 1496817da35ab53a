"""The pictures of a run, and an epoch's batches of them, each a random part of a picture, which Pillow makes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from model.config import Size
from model.data.pictures import Images
from model.runtime.device import choose_dtype
from model.training.recipe import Recipe

# Bounds a validation batch of large images, and so its memory.
_VALIDATION_PIXELS = 500 * 32 * 32

# Pictures that random parts are resized from are kept larger than the model's input by this factor.
MARGIN: Final = 256 / 224

# Least and largest width / height of a crop.
_CROP_RATIO: Final = (3 / 4, 4 / 3)
# How often a crop that does not fit is drawn again, as in torchvision and timm.
_ATTEMPTS: Final = 10


class Arithmetic:
    """The device that a run computes on, and its dtype of activations and gradients; weights are float32."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self.dtype = choose_dtype(precision, device)
        if self.dtype == torch.float16:  # would need loss scaling; only devices older than 2020 get here
            self.dtype = torch.float32
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)


@dataclass(frozen=True)
class TrainingData:
    """Training and validation images.

    Attributes:
        train: of any size.
        validation: of the size of the model's input.
        mean, std: of each channel, of pixels scaled to 0...1.
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

    def epoch(self, recipe: Recipe, generator: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield an epoch's batches, each augmented while the one before it is used; a last, smaller one is left out.

        Yields:
            Pixels, uint8 [B, C, rows, columns]; their labels, int64 [B].
        """
        order, size = generator.permutation(len(self.train)), recipe.batch_size
        batches = order[: len(order) - len(order) % size].reshape(-1, size)

        def read(indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
            pixels = np.ascontiguousarray(self.train.pixels[indices].transpose(0, 2, 3, 1))
            changed = np.stack([self._augmented(Image.fromarray(each), recipe, generator) for each in pixels])
            return torch.from_numpy(changed.transpose(0, 3, 1, 2)), torch.from_numpy(self.train.labels[indices])

        with ThreadPoolExecutor(1) as reader:
            following = reader.submit(read, batches[0])
            for each in batches[1:]:
                present, following = following, reader.submit(read, each)
                yield present.result()
            yield following.result()

    def _augmented(self, image: Image.Image, recipe: Recipe, generator: np.random.Generator) -> NDArray[np.uint8]:
        image = random_resized_crop(image, self.size, recipe.resized_crop, generator)
        if recipe.flip and generator.random() < 0.5:
            image = ImageOps.mirror(image)
        return np.asarray(image)

    def validation_batches(self) -> Iterator[Tensor]:
        """Yield the validation images, uint8 [B, C, rows, columns], in order."""
        batch = max(1, _VALIDATION_PIXELS // (self.size[0] * self.size[1]))
        for start in range(0, len(self.validation), batch):
            yield torch.from_numpy(self.validation.pixels[start : start + batch])


def random_resized_crop(
    image: Image.Image, size: Size, least_share: float, generator: np.random.Generator
) -> Image.Image:
    """Resize a random part of a picture to `size`.

    Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 6; torchvision's `RandomResizedCrop`. Where no part
    of an allowed shape was drawn (very long pictures), it is the largest part of allowed shape in the middle.

    Args:
        least_share: of the picture's area that the part covers, above 0 and up to 1.
    """
    width = min(image.width, round(image.height * _CROP_RATIO[1]))
    height = min(image.height, round(image.width / _CROP_RATIO[0]))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    for _ in range(_ATTEMPTS):
        area = generator.uniform(least_share, 1) * image.width * image.height
        ratio = math.exp(generator.uniform(math.log(_CROP_RATIO[0]), math.log(_CROP_RATIO[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= image.width and 0 < high <= image.height:
            width, height = wide, high
            left, top = (int(generator.integers(room + 1)) for room in (image.width - wide, image.height - high))
            break
    box = (left, top, left + width, top + height)
    return image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)
