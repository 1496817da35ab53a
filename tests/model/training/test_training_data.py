from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model.training.recipe import Recipe
from model.training.training_data import TrainingData, read_ahead
from tests.model.training.runs import same, trained

pytestmark = pytest.mark.timeout(120)  # models are trained


def enlarged(pixels: Tensor) -> Tensor:
    """Twice the rows, three times the columns."""
    return pixels.repeat_interleave(2, dim=2).repeat_interleave(3, dim=3)


def test_pictures_in_a_mapped_file_train_as_those_in_memory(recipe: Recipe, data: TrainingData, tmp_path: Path) -> None:
    np.save(tmp_path / "pixels.npy", data.pixels.numpy())
    mapped = np.load(tmp_path / "pixels.npy", mmap_mode="r+")
    stored = replace(data, pixels=torch.from_numpy(mapped))
    assert same(trained(recipe, data, tmp_path / "a"), trained(recipe, stored, tmp_path / "b"))


@pytest.mark.parametrize("changes", [{}, {"augmentation.resized_crop": 0.5}], ids=["cut out", "resized"])
def test_pictures_larger_than_the_input_are_trained_on(
    recipe: Recipe, data: TrainingData, tmp_path: Path, changes: dict[str, float]
) -> None:
    large = replace(data, pixels=enlarged(data.pixels))
    trainer = trained(recipe.override({"epochs": 6, **changes}), large, tmp_path)
    assert trainer.history[-1].validation_accuracy is not None
    assert trainer.history[-1].validation_accuracy > 0.6


def test_pictures_smaller_than_the_input_are_enlarged_where_crops_are_resized(
    recipe: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    small = replace(data, pixels=data.pixels[:, :, ::2].contiguous())
    trainer = trained(recipe.override({"epochs": 1, "augmentation.resized_crop": 0.5}), small, tmp_path)
    assert trainer.history[-1].images == 8 * recipe.batch_size


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


def test_what_goes_wrong_in_reading_is_raised_where_the_item_is_used() -> None:
    def read(number: int) -> int:
        if number == 1:
            raise OSError("gone")
        return number

    items: Iterator[int] = read_ahead(read, range(3))
    assert next(items) == 0
    with pytest.raises(OSError, match="gone"):
        next(items)


def test_nothing_to_read_gives_nothing() -> None:
    assert list(read_ahead(str, [])) == []
