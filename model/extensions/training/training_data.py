"""The pictures of a run, the batches of an epoch, and random changes of pictures and pairs.

The operations follow TrivialAugment (Müller and Hutter 2021, https://arxiv.org/abs/2103.10158,
table 1, the "RA" space). Pixels from outside the picture are black.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from model.extensions.datasets.pictures import Images
from model.extensions.training.recipe import Augmentation, Mixing
from model.layer_config import Size
from model.runtime.device import choose_dtype

# Most pixels of a validation batch, which bound its memory.
_VALIDATION_PIXELS: Final = 500 * 32 * 32


class Arithmetic:
    """The device of a run, and its dtype of activations and gradients; weights are float32."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self.device = device
        self.dtype = choose_dtype(precision, device)
        # float16 would need loss scaling. Only devices older than 2020 lack bfloat16.
        if self.dtype == torch.float16:
            self.dtype = torch.float32
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16
        )


@dataclass(frozen=True)
class TrainingData:
    """Training and validation images, in memory or mapped from a file.

    Attributes:
        train: training images, at least as large as the model's input unless crops are resized.
        validation: validation images, as large as the model's input.
        mean, std: statistics of each channel, for values from 0 to 1.
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
        """Return uint8 [B, C, H, W] as float32, normalised as in the service."""
        mean = torch.tensor(self.mean, device=pixels.device).reshape(1, -1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).reshape(1, -1, 1, 1)
        return (pixels.float() / 255 - mean) / std

    def epoch(
        self, batch_size: int, settings: Augmentation, generator: np.random.Generator
    ) -> Iterator[tuple[NDArray[np.int64], Tensor, Tensor]]:
        """Yield the batches of an epoch, without a smaller last batch.

        Each batch is augmented while the caller uses the previous batch.

        Yields:
            Indices of training images, int64 [B]; pixels, uint8 [B, C, rows, columns]; labels,
            int64 [B].
        """
        order = generator.permutation(len(self.train))
        batches = order[: len(order) - len(order) % batch_size].reshape(-1, batch_size)

        def read(indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], Tensor, Tensor]:
            pixels = augment(self.train.pixels[indices], self.size, settings, generator)
            return indices, torch.from_numpy(pixels), torch.from_numpy(self.train.labels[indices])

        with ThreadPoolExecutor(1) as reader:
            following = reader.submit(read, batches[0])
            for indices in batches[1:]:
                present = following
                following = reader.submit(read, indices)
                yield present.result()
            yield following.result()

    def validation_batches(self) -> Iterator[Tensor]:
        """Yield the validation images, uint8 [B, C, rows, columns], in order."""
        batch = max(1, _VALIDATION_PIXELS // (self.size[0] * self.size[1]))
        for start in range(0, len(self.validation), batch):
            yield torch.from_numpy(self.validation.pixels[start : start + batch])


# Changes a picture with a strength, -1...1.
Operation = Callable[[Image.Image, float], Image.Image]

# Size of the pictures that crops are resized from, relative to the model's input.
MARGIN: Final = 256 / 224

# Smallest and largest width / height of a crop.
_CROP_RATIO: Final = (3 / 4, 4 / 3)
# Number of draws of a crop that fits, as in torchvision and timm.
_ATTEMPTS: Final = 10
# Factor by which `resample` enlarges the sides; a larger factor hardly changes the result.
_ENLARGED: Final = 4
_MAX_ROTATION: Final = 30.0
_MAX_SHEAR: Final = 0.3
_MAX_TRANSLATION: Final = 10 / 32
_MAX_ENHANCEMENT: Final = 0.9


def augment(
    pixels: NDArray[np.uint8], size: Size, settings: Augmentation, generator: np.random.Generator
) -> NDArray[np.uint8]:
    """Change each picture of a batch on its own.

    Args:
        pixels: uint8 [B, 3, H, W].
        size: (rows, columns) of the result. Unless crops are resized, at most the padded size.
        settings: the random changes.
        generator: source of all random numbers.

    Returns:
        uint8 [B, 3, rows, columns].
    """
    changed = [
        _augment_one(Image.fromarray(image), size, settings, generator)
        for image in np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
    ]
    return np.stack([np.asarray(image) for image in changed]).transpose(0, 3, 1, 2)


def _augment_one(
    image: Image.Image, size: Size, settings: Augmentation, generator: np.random.Generator
) -> Image.Image:
    if settings.resized_crop:
        image = random_resized_crop(image, size, settings.resized_crop, generator)
    else:
        image = random_crop(image, size, settings.crop_padding, generator)
    if settings.flip and generator.random() < 0.5:
        image = ImageOps.mirror(image)
    if generator.random() < settings.resample:
        large = image.resize(
            (_ENLARGED * image.width, _ENLARGED * image.height), Image.Resampling.BICUBIC
        )
        image = large.resize(image.size, Image.Resampling.BICUBIC)
    if generator.random() < settings.trivial_augment:
        operation = OPERATIONS[generator.integers(len(OPERATIONS))]
        image = operation(image, generator.uniform(-1, 1))
    return image


def random_crop(
    image: Image.Image, size: Size, padding: int, generator: np.random.Generator
) -> Image.Image:
    """Cut a random part of `size` out of a picture with a black border of `padding` pixels.

    He et al. 2015, https://arxiv.org/abs/1512.03385, section 4.2.
    """
    top = int(generator.integers(image.height + 2 * padding - size[0] + 1)) - padding
    left = int(generator.integers(image.width + 2 * padding - size[1] + 1)) - padding
    return image.crop((left, top, left + size[1], top + size[0]))


def random_resized_crop(
    image: Image.Image, size: Size, least_share: float, generator: np.random.Generator
) -> Image.Image:
    """Resize a random part of a picture to `size`.

    Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 6; torchvision's
    `RandomResizedCrop`. If no draw fits, as in very long pictures, the part is the largest one of
    an allowed shape in the middle.

    Args:
        least_share: smallest share of the picture's area, above 0 and at most 1.
    """
    width = min(image.width, round(image.height * _CROP_RATIO[1]))
    height = min(image.height, round(image.width / _CROP_RATIO[0]))
    left = (image.width - width) // 2
    top = (image.height - height) // 2
    for _ in range(_ATTEMPTS):
        area = generator.uniform(least_share, 1) * image.width * image.height
        ratio = math.exp(generator.uniform(math.log(_CROP_RATIO[0]), math.log(_CROP_RATIO[1])))
        wide = round(math.sqrt(area * ratio))
        high = round(math.sqrt(area / ratio))
        if 0 < wide <= image.width and 0 < high <= image.height:
            width = wide
            height = high
            left = int(generator.integers(image.width - wide + 1))
            top = int(generator.integers(image.height - high + 1))
            break
    box = (left, top, left + width, top + height)
    return image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)


def _enhance(
    kind: type[
        ImageEnhance.Color
        | ImageEnhance.Contrast
        | ImageEnhance.Brightness
        | ImageEnhance.Sharpness
    ],
) -> Operation:
    return lambda image, strength: kind(image).enhance(1 + _MAX_ENHANCEMENT * strength)


def _shift(
    image: Image.Image, across: tuple[float, float], down: tuple[float, float]
) -> Image.Image:
    """Move and shear a picture.

    Args:
        across, down: distance in pixels, and factor of the distance from the middle.
    """
    matrix = (
        1,
        across[1],
        across[0] - across[1] * image.height / 2,
        down[1],
        1,
        down[0] - down[1] * image.width / 2,
    )
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


# The fourteen operations of TrivialAugment.
OPERATIONS: Final[tuple[Operation, ...]] = (
    lambda image, strength: image,
    lambda image, strength: ImageOps.autocontrast(image),
    lambda image, strength: ImageOps.equalize(image),
    lambda image, strength: ImageOps.solarize(image, math.ceil(255 * (1 - abs(strength)))),
    lambda image, strength: ImageOps.posterize(image, 8 - round(4 * abs(strength))),
    _enhance(ImageEnhance.Color),
    _enhance(ImageEnhance.Contrast),
    _enhance(ImageEnhance.Brightness),
    _enhance(ImageEnhance.Sharpness),
    lambda image, strength: image.rotate(_MAX_ROTATION * strength, Image.Resampling.BILINEAR),
    lambda image, strength: _shift(image, (0, _MAX_SHEAR * strength), (0, 0)),
    lambda image, strength: _shift(image, (0, 0), (0, _MAX_SHEAR * strength)),
    lambda image, strength: _shift(image, (_MAX_TRANSLATION * strength * image.width, 0), (0, 0)),
    lambda image, strength: _shift(image, (0, 0), (_MAX_TRANSLATION * strength * image.height, 0)),
)


def mix(
    pixels: Tensor, targets: Tensor, mixing: Mixing, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Mix the images of a batch in pairs, first with last, or return the batch unchanged.

    Mixup (Zhang et al. 2017, https://arxiv.org/abs/1710.09412) blends all pixels. CutMix (Yun et
    al. 2019, https://arxiv.org/abs/1905.04899) replaces a rectangle. As in timm, the whole batch
    has one proportion.

    Args:
        pixels: float32 [B, C, H, W].
        targets: float32 [B, K]; each row sums to 1.
        mixing: the probability, and how to mix.
        generator: source of all random numbers.

    Returns:
        New pixels and targets of the same shapes.
    """
    if generator.random() >= mixing.probability or not (mixing.mixup or mixing.cutmix):
        return pixels, targets
    if mixing.cutmix and (not mixing.mixup or generator.random() < 0.5):
        edge = math.sqrt(1 - generator.beta(mixing.cutmix, mixing.cutmix))
        box = []
        for length in pixels.shape[2:]:
            half = int(length * edge) // 2
            middle = int(generator.integers(length))
            box.append(slice(max(middle - half, 0), min(middle + half, length)))
        mixed = pixels.clone()
        mixed[:, :, box[0], box[1]] = pixels.flip(0)[:, :, box[0], box[1]]
        replaced = (box[0].stop - box[0].start) * (box[1].stop - box[1].start)
        share = 1 - replaced / math.prod(pixels.shape[2:])
    else:
        share = generator.beta(mixing.mixup, mixing.mixup)
        mixed = torch.lerp(pixels.flip(0), pixels, share)
    return mixed, torch.lerp(targets.flip(0), targets, share)
