from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.data.pictures import Images
from model.errors import TrainingError
from model.training.loop import batches
from model.training.recipe import Recipe
from tests.model.training.runs import changed, same_tensors, trained

pytestmark = pytest.mark.timeout(120)  # models are trained


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_loss_falls_on_pictures_of_any_size(recipe: Recipe, pictures: Images, precision: str) -> None:
    enlarged = Images(pictures.pixels.repeat(2, axis=2).repeat(3, axis=3), pictures.labels)
    weights, losses = trained(changed(recipe, precision=precision, epochs=6), enlarged)
    assert losses[-1] < 0.7 * losses[0]
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_a_recipe_ends_in_the_same_bits_and_each_part_of_it_has_an_effect(recipe: Recipe, pictures: Images) -> None:
    plain = changed(recipe, epochs=1, weight_decay=0.0)
    changes: dict[str, Any] = {
        "seed": 4,
        "label_smoothing": 0.1,
        "learning_rate": 1e-3,
        "layer_decay": 0.8,
        "clip_norm": 0.01,
        "weight_decay": 0.1,
        "warmup": 0.3,
        "flip": False,
        "resized_crop": 0.9,
    }
    first = trained(plain, pictures)[0]
    torch.manual_seed(999)  # the rest of the process may have drawn numbers in between
    assert same_tensors(first, trained(plain, pictures)[0])
    for name, value in changes.items():
        assert not same_tensors(first, trained(changed(plain, **{name: value}), pictures)[0]), name


def test_a_diverged_run_stops(recipe: Recipe, pictures: Images) -> None:
    with pytest.raises(TrainingError, match="the loss is not finite; lower the learning rate"):
        trained(changed(recipe, learning_rate=1e30), pictures)


def test_an_epoch_has_every_image_once_but_for_a_smaller_last_batch(recipe: Recipe, pictures: Images) -> None:
    recipe = changed(recipe, batch_size=60, resized_crop=1.0, flip=False)
    numbered = Images(pictures.pixels, np.arange(len(pictures)))
    once, again = (list(batches(numbered, (32, 32), recipe, np.random.default_rng(0))) for _ in range(2))
    seen = np.concatenate([numbers for _, numbers in once])
    assert (len(once), len(set(seen.tolist()))) == (5, 300)
    for (pixels, numbers), (same, _) in zip(once, again, strict=True):
        # The least that is cut away at an edge is a few pixels, and the colours are those of the class.
        means = pictures.pixels[numbers.numpy()].mean(axis=(2, 3))
        np.testing.assert_allclose(pixels.numpy().mean(axis=(1, 2)), means, atol=3)
        np.testing.assert_array_equal(pixels, same)
