from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from model.extensions.datasets.pictures import Images
from model.extensions.training.recipe import Augmentation, Mixing, Recipe
from model.extensions.training.training_data import (
    OPERATIONS,
    TrainingData,
    augment,
    mix,
    random_crop,
    random_resized_crop,
)
from tests.extensions.training.runs import trained

pytestmark = pytest.mark.timeout(120)  # models are trained


def test_an_epoch_has_every_image_once(data: TrainingData) -> None:
    plain = Augmentation(crop_padding=0, flip=False)
    batches = list(data.epoch(60, plain, np.random.default_rng(0)))
    seen = np.concatenate([indices for indices, _, _ in batches])
    assert (len(batches), len(set(seen.tolist()))) == (5, 300)
    for indices, pixels, labels in batches:
        np.testing.assert_array_equal(pixels.numpy(), data.train.pixels[indices])
        np.testing.assert_array_equal(labels.numpy(), data.train.labels[indices])
    validation = np.concatenate([batch.numpy() for batch in data.validation_batches()])
    np.testing.assert_array_equal(validation, data.validation.pixels)


@pytest.mark.parametrize(
    "changes", [{}, {"augmentation.resized_crop": 0.5}], ids=["cut out", "resized"]
)
def test_large_pictures_can_be_trained_on(
    recipe: Recipe, data: TrainingData, tmp_path: Path, changes: dict[str, float]
) -> None:
    enlarged = Images(data.train.pixels.repeat(2, axis=2).repeat(3, axis=3), data.train.labels)
    trainer = trained(
        recipe.override({"epochs": 4, **changes}), replace(data, train=enlarged), tmp_path
    )
    assert trainer.history[-1]["validation_accuracy"] > 0.5


PLAIN = Augmentation(crop_padding=0, flip=False)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def noise(count: int = 12, size: tuple[int, int] = (16, 20)) -> NDArray[np.uint8]:
    return generator().integers(0, 256, (count, 3, *size), dtype=np.uint8)


def test_the_seed_decides_every_change() -> None:
    pixels = noise()
    np.testing.assert_array_equal(augment(pixels, (16, 20), PLAIN, generator()), pixels)
    settings = Augmentation(resample=0.5, trivial_augment=0.5)
    once, again, other = (
        augment(pixels, (16, 20), settings, generator(seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(once, again)
    assert (once != other).any()
    assert once.shape == pixels.shape


def test_crops_lie_within_black_padding() -> None:
    image = Image.fromarray(np.full((8, 8, 3), 255, np.uint8))
    draw = generator()
    parts = np.stack([np.asarray(random_crop(image, (8, 8), 2, draw)) for _ in range(300)])[..., 0]
    rows = {tuple(part.any(axis=1)) for part in parts}
    columns = {tuple(part.any(axis=0)) for part in parts}
    assert len(rows) == len(columns) == 5
    assert set(np.unique(parts)) == {0, 255}


def test_a_resized_crop_keeps_its_bounds() -> None:
    across, down = np.meshgrid(np.arange(60), np.arange(40))
    image = Image.fromarray(np.stack((across, down, down), axis=-1).astype(np.uint8))
    draw = generator()
    for _ in range(100):
        part = np.asarray(random_resized_crop(image, (30, 30), 0.4, draw)).astype(float)
        assert part.shape == (30, 30, 3)
        width = (part[..., 0].max() - part[..., 0].min()) + 2
        height = (part[..., 1].max() - part[..., 1].min()) + 2
        assert 0.3 < width * height / 2400 <= 1.1
        assert 0.6 < width / height < 1.6
    long = Image.fromarray(np.zeros((4, 100, 3), np.uint8))
    assert random_resized_crop(long, (8, 8), 0.9, draw).size == (8, 8)


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_operations_grow_with_their_strength(number: int) -> None:
    pixels = np.ascontiguousarray(noise(1)[0].transpose(1, 2, 0)) // 2 + 40
    image = Image.fromarray(pixels)
    weakest, strongest = (
        np.asarray(OPERATIONS[number](image, strength)).astype(int) for strength in (0.0, 1.0)
    )
    assert weakest.shape == strongest.shape == pixels.shape
    if number not in (0, 1, 2):  # identity, auto contrast and equalise lack a strength
        assert np.abs(weakest - pixels).max() <= 1
        assert (strongest != pixels).any()
    if number in (10, 11):  # a shear does not move the middle row or column
        odd = np.ascontiguousarray(noise(1, (21, 21))[0].transpose(1, 2, 0))
        moved = np.asarray(OPERATIONS[number](Image.fromarray(odd), 1.0))
        middle = np.abs(moved.astype(int) - odd)[(10,) if number == 10 else (slice(None), 10)]
        assert middle.max() <= 1 < np.abs(moved.astype(int) - odd).max()


def test_mixed_targets_match_mixed_pixels() -> None:
    pixels = torch.zeros(6, 1, 10, 10)
    pixels[:3] = 1.0
    targets = torch.zeros(6, 2)
    targets[:3, 0] = 1.0
    targets[3:, 1] = 1.0
    shares: dict[str, list[float]] = {"mixup": [], "cutmix": []}
    for name, found in shares.items():
        draw = generator()
        for _ in range(200):
            mixed, labels = mix(pixels, targets, Mixing.model_validate({name: 1.0}), draw)
            torch.testing.assert_close(labels.sum(dim=1), torch.ones(6))
            torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), labels[:, 0])
            values = mixed[0].unique()
            assert len(values) == 1 if name == "mixup" else set(values.tolist()) <= {0.0, 1.0}
            found.append(float(labels[0, 0]))
        assert 0.4 < np.mean(found) < 0.85  # a rectangle is cut at the edge of the picture
    assert (pixels[:3] == 1).all()
