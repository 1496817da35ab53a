from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.data.pictures import Images
from model.training.recipe import Recipe
from model.training.training_data import TrainingData
from tests.model.training.runs import changed, trained

pytestmark = pytest.mark.timeout(120)  # models are trained


def test_an_epoch_has_every_image_once_but_for_a_smaller_last_batch(data: TrainingData, recipe: Recipe) -> None:
    recipe = changed(recipe, batch_size=60, resized_crop=1.0, flip=False)
    numbered = Images(data.train.pixels, np.arange(len(data.train)))
    batches = list(replace(data, train=numbered).epoch(recipe, np.random.default_rng(0)))
    seen = np.concatenate([numbers for _, numbers in batches])
    assert (len(batches), len(set(seen.tolist()))) == (5, 300)
    again = list(replace(data, train=numbered).epoch(recipe, np.random.default_rng(0)))
    for (pixels, numbers), (same, _) in zip(batches, again, strict=True):
        # The least that is cut away at an edge is a few pixels, and the colours are those of the class.
        means = data.train.pixels[numbers.numpy()].mean(axis=(2, 3))
        np.testing.assert_allclose(pixels.numpy().mean(axis=(2, 3)), means, atol=3)
        np.testing.assert_array_equal(pixels, same)
    validation = np.concatenate([batch.numpy() for batch in data.validation_batches()])
    np.testing.assert_array_equal(validation, data.validation.pixels)


def test_pictures_larger_than_the_input_are_trained_on(recipe: Recipe, data: TrainingData) -> None:
    enlarged = Images(data.train.pixels.repeat(2, axis=2).repeat(3, axis=3), data.train.labels)
    trainer, _ = trained(changed(recipe, epochs=6), replace(data, train=enlarged))
    assert trainer.history[-1]["validation_accuracy"] > 0.5
