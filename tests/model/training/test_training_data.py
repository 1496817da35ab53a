from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.data.pictures import Images
from model.training.recipe import Augmentation, Recipe
from model.training.training_data import TrainingData
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
    assert trainer.history[-1]["validation_accuracy"] > 0.5
