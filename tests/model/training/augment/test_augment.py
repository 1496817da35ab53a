from __future__ import annotations

import pytest
import torch

from model.training.augment.augment import augment, random_crop, random_flip
from model.training.recipe import Augmentation


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_crop_is_the_picture_shifted_within_black_by_at_most_the_padding() -> None:
    images = torch.randint(1, 256, (64, 3, 8, 12), dtype=torch.uint8, generator=seeded())
    cropped = random_crop(images, 2, seeded(), (8, 12))
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    shifts = set()
    for image, result in zip(padded, cropped, strict=True):
        found = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(image[:, top : top + 8, left : left + 12], result)
        ]
        assert len(found) == 1
        shifts.add(found[0])
    assert {top for top, _ in shifts} == {left for _, left in shifts} == set(range(5))


def test_a_crop_without_padding_changes_nothing() -> None:
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=seeded())
    assert torch.equal(random_crop(images, 0, seeded(), (8, 8)), images)


def test_about_half_of_the_images_are_mirrored_left_to_right_and_the_others_kept() -> None:
    images = torch.randint(0, 256, (200, 3, 8, 12), dtype=torch.uint8, generator=seeded())
    flipped = random_flip(images, seeded())
    mirrored = [torch.equal(result, image.flip(-1)) for image, result in zip(images, flipped, strict=True)]
    kept = [torch.equal(result, image) for image, result in zip(images, flipped, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 60 < sum(mirrored) < 140


def test_augmentation_leaves_its_input_alone_and_follows_its_generator() -> None:
    images = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8, generator=seeded())
    before = images.clone()
    first = random_flip(random_crop(images, 3, seeded(5), (8, 8)), seeded(6))
    again = random_flip(random_crop(images, 3, seeded(5), (8, 8)), seeded(6))
    other = random_flip(random_crop(images, 3, seeded(7), (8, 8)), seeded(6))
    assert torch.equal(images, before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_random_part_is_cut_out_of_images_that_are_larger_than_the_result() -> None:
    images = torch.randint(1, 256, (200, 1, 10, 12), dtype=torch.uint8, generator=seeded())
    parts = random_crop(images, 0, seeded(), (8, 8))
    places = set()
    for image, part in zip(images, parts, strict=True):
        places |= {
            (top, left)
            for top in range(3)
            for left in range(5)
            if torch.equal(image[:, top : top + 8, left : left + 8], part)
        }
    assert places == {(top, left) for top in range(3) for left in range(5)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"crop_padding": 0, "flip": False},
        {"resized_crop": 0.3},
        {"trivial_augment": 1.0},
        {"rand_augment": 2, "resized_crop": 0.5},
    ],
    ids=["default", "window", "resized", "trivial", "rand"],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_whatever_is_asked_for_the_result_has_the_models_size(changes: dict[str, float], channels: int) -> None:
    images = torch.randint(0, 256, (16, channels, 20, 28), dtype=torch.uint8, generator=seeded())
    before = images.clone()
    settings = Augmentation.model_validate(changes)
    first, again, other = (augment(images, (16, 16), settings, seeded(seed)) for seed in (1, 1, 2))
    assert first.shape == (16, channels, 16, 16)
    assert first.dtype == torch.uint8
    assert torch.equal(images, before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_resampling_begins_where_the_schedule_says() -> None:
    images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    settings = Augmentation(crop_padding=0, flip=False, resample=1.0, resample_since=0.5)

    def at(progress: float) -> torch.Tensor:
        return augment(images, (16, 16), settings, torch.Generator().manual_seed(0), progress)

    assert torch.equal(at(0.49), images)
    assert not torch.equal(at(0.5), images)
