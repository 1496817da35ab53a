from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.data.pictures import Images
from model.training.recipe import Augmentation, Recipe
from model.training.training_data import TrainingData, read_ahead
from tests.model.training.runs import trained

pytestmark = pytest.mark.timeout(120)  # models are trained


def test_an_epoch_has_every_image_once_but_for_a_smaller_last_batch(data: TrainingData) -> None:
    plain = Augmentation(crop_padding=0, flip=False)
    batches = list(data.epoch(60, plain, np.random.default_rng(0)))
    seen = np.concatenate([indices for indices, _, _ in batches])
    assert (len(batches), len(set(seen.tolist()))) == (5, 300)
    for indices, pixels, labels in batches:
        np.testing.assert_array_equal(pixels.numpy(), data.train.pixels[indices])
        np.testing.assert_array_equal(labels.numpy(), data.train.labels[indices])
    validation = np.concatenate([batch.numpy() for batch in data.validation_batches()])
    np.testing.assert_array_equal(validation, data.validation.pixels)


@pytest.mark.parametrize("changes", [{}, {"augmentation.resized_crop": 0.5}], ids=["cut out", "resized"])
def test_pictures_larger_than_the_input_are_trained_on(
    recipe: Recipe, data: TrainingData, tmp_path: Path, changes: dict[str, float]
) -> None:
    enlarged = Images(data.train.pixels.repeat(2, axis=2).repeat(3, axis=3), data.train.labels)
    trainer = trained(recipe.override({"epochs": 4, **changes}), replace(data, train=enlarged), tmp_path)
    assert trainer.history[-1].validation_accuracy > 0.5


def test_items_come_in_order_each_read_while_the_one_before_is_used() -> None:
    began = [threading.Event() for _ in range(4)]

    def read(number: int) -> int:
        began[number].set()
        return 10 * number

    seen = []
    for value in read_ahead(read, range(4)):
        seen.append(value)
        following = len(seen)
        if following < 4:
            assert began[following].wait(10)
        assert not any(event.is_set() for event in began[following + 1 :])
    assert seen == [0, 10, 20, 30]
    assert list(read_ahead(str, [])) == []


def test_what_goes_wrong_in_reading_is_raised_where_the_item_is_used() -> None:
    def read(number: int) -> int:
        if number == 1:
            raise OSError("gone")
        return number

    items: Iterator[int] = read_ahead(read, range(3))
    assert next(items) == 0
    with pytest.raises(OSError, match="gone"):
        next(items)
