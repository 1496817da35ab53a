from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from model.training.augment.image_operations import (
    MAX_ENHANCEMENT,
    MAX_ROTATION,
    MAX_SHEAR,
    MAX_TRANSLATION,
    MIN_POSTERIZE_BITS,
    OPERATIONS,
    apply_operations,
)

NAMES = list(OPERATIONS)


def pictures(count: int = 4, size: tuple[int, int] = (32, 48), channels: int = 3) -> Tensor:
    """Smooth gradients under noise, of limited contrast, each another one."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[: size[0], : size[1]]
    planes = []
    for _ in range(count * channels):
        slope = rng.uniform(-2, 2, 2)
        planes.append(np.clip(120 + slope[0] * rows + slope[1] * columns + rng.normal(0, 6, size), 20, 230))
    return torch.from_numpy(np.stack(planes).reshape(count, channels, *size).astype(np.uint8))


def applied(name: str, images: Tensor, strength: float) -> Tensor:
    count = len(images)
    return apply_operations(images, torch.full((count,), NAMES.index(name)), torch.full((count,), strength))


def by_pil(images: Tensor, change: object) -> Tensor:
    assert callable(change)
    results = [np.asarray(change(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in images]
    return torch.from_numpy(np.stack(results)).permute(0, 3, 1, 2)


def furthest(one: Tensor, other: Tensor) -> int:
    return int((one.int() - other.int()).abs().max())


def test_equalize_is_pils_to_the_last_bit() -> None:
    images = pictures()
    assert torch.equal(applied("equalize", images, 0.3), by_pil(images, ImageOps.equalize))


def test_equalize_leaves_a_flat_picture_alone() -> None:
    flat = torch.full((1, 3, 16, 16), 77, dtype=torch.uint8)
    assert torch.equal(applied("equalize", flat, 0.3), by_pil(flat, ImageOps.equalize))
    assert torch.equal(applied("equalize", flat, 0.3), flat)


def test_auto_contrast_is_pils_but_for_rounding() -> None:
    images = pictures()
    ours = applied("auto_contrast", images, 0.3)
    assert furthest(ours, by_pil(images, ImageOps.autocontrast)) <= 1
    assert ours.amin(dim=(2, 3)).eq(0).all()
    assert ours.amax(dim=(2, 3)).eq(255).all()


@pytest.mark.parametrize("strength", [-0.6, 0.2, 1.0])
def test_solarize_is_pils(strength: float) -> None:
    images = pictures()
    threshold = math.ceil(255 * (1 - abs(strength)))
    assert torch.equal(
        applied("solarize", images, strength), by_pil(images, lambda image: ImageOps.solarize(image, threshold))
    )


@pytest.mark.parametrize(("strength", "bits"), [(0.0, 8), (0.5, 6), (-0.75, 5), (1.0, MIN_POSTERIZE_BITS)])
def test_posterize_is_pils(strength: float, bits: int) -> None:
    images = pictures()
    assert torch.equal(
        applied("posterize", images, strength), by_pil(images, lambda image: ImageOps.posterize(image, bits))
    )


@pytest.mark.parametrize("strength", [-1.0, -0.4, 0.5, 1.0])
@pytest.mark.parametrize(
    ("name", "enhancer"),
    [
        ("colour", ImageEnhance.Color),
        ("contrast", ImageEnhance.Contrast),
        ("brightness", ImageEnhance.Brightness),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
def test_enhancements_are_pils_but_for_rounding(name: str, enhancer: type, strength: float) -> None:
    images = pictures()
    factor = 1 + MAX_ENHANCEMENT * strength
    theirs = by_pil(images, lambda image: enhancer(image).enhance(factor))
    ours = applied(name, images, strength)
    assert furthest(ours, theirs) <= 2  # PIL rounds the grey or smoothed picture, too, and cuts the result off
    assert furthest(ours, images) > 5


@pytest.mark.parametrize("strength", [-1.0, 0.3, 1.0])
def test_a_rotation_is_pils_but_for_rounding(strength: float) -> None:
    def turn(image: Image.Image) -> Image.Image:
        return image.rotate(-MAX_ROTATION * strength, Image.Resampling.BILINEAR)  # positive is clockwise here

    images = pictures()
    inside = by_pil(torch.full_like(images, 255), turn).eq(255)
    # PIL repeats the edge pixels half a pixel outwards, where this fades to black.
    ours_inside = applied("rotate", torch.full_like(images, 255), strength).eq(255)
    both = inside & ours_inside
    assert both.float().mean() > 0.5
    assert (inside != ours_inside).float().mean() < 0.1
    assert furthest(applied("rotate", images, strength)[both], by_pil(images, turn)[both]) <= 1


@pytest.mark.parametrize("pixels", [-3, 2, 10])
def test_a_translation_shifts_by_whole_pixels_and_brings_black_into_view(pixels: int) -> None:
    images = pictures(size=(32, 32)).clamp_min(1)
    strength = pixels / (MAX_TRANSLATION * 32)
    expected = torch.zeros_like(images)
    if pixels > 0:
        expected[..., :-pixels] = images[..., pixels:]
    else:
        expected[..., -pixels:] = images[..., :pixels]
    assert furthest(applied("translate_x", images, strength), expected) <= 1
    upright = applied("translate_y", images.transpose(2, 3).contiguous(), strength).transpose(2, 3)
    assert furthest(upright, expected) <= 1


def test_a_shear_moves_rows_in_proportion_to_their_distance_from_the_middle() -> None:
    images = torch.zeros((1, 3, 33, 33), dtype=torch.uint8)
    images[..., 16] = 240  # a vertical line
    sheared = applied("shear_x", images, 1.0)[0, 0].float()
    place = (sheared * torch.arange(33)).sum(dim=1) / sheared.sum(dim=1)
    expected = 16 - MAX_SHEAR * (torch.arange(33) - 16)
    torch.testing.assert_close(place[2:-2], expected[2:-2], atol=0.1, rtol=0)
    other_way = applied("shear_y", images.transpose(2, 3).contiguous(), 1.0)[0, 0].float().T
    torch.testing.assert_close(other_way, sheared, atol=1.0, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_treats_each_image_by_itself_and_takes_one_channel(name: str) -> None:
    images = pictures(3)
    together = applied(name, images, 0.7)
    alone = torch.cat([applied(name, images[i : i + 1], 0.7) for i in range(3)])
    assert torch.equal(together, alone)
    grey = applied(name, images[:, :1].contiguous(), 0.7)
    assert grey.shape == (3, 1, 32, 48)
    assert grey.dtype == torch.uint8


def test_only_the_chosen_images_are_changed() -> None:
    images = pictures(3)
    before = images.clone()
    changed = apply_operations(images, torch.tensor([-1, NAMES.index("brightness"), -1]), torch.full((3,), -1.0))
    assert torch.equal(images, before)
    assert torch.equal(changed[[0, 2]], images[[0, 2]])
    assert changed[1].float().mean() < 0.2 * images[1].float().mean()
