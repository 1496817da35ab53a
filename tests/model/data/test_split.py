from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.data.datasets import stratify
from model.errors import DatasetError

counts = st.lists(st.integers(2, 60), min_size=2, max_size=12)
validation = st.one_of(st.floats(0.001, 0.999), st.integers(0, 10**6))


def labels_of(counts: list[int], seed: int) -> np.ndarray:
    labels = np.repeat(np.arange(len(counts)), counts)
    np.random.default_rng(seed).shuffle(labels)
    return labels


def names_of(counts: list[int]) -> tuple[str, ...]:
    return tuple(str(index) for index in range(len(counts)))


@given(counts, validation, st.integers(0, 1000))
def test_no_picture_is_lost_or_on_both_sides_and_every_class_is_on_either(
    counts: list[int], validation: int | float, seed: int
) -> None:
    if isinstance(validation, int):
        validation = len(counts) + validation % (sum(counts) - 2 * len(counts) + 1)
    labels = labels_of(counts, seed)
    kept, aside = stratify(labels, names_of(counts), validation, seed)
    assert sorted([*kept, *aside]) == list(range(len(labels)))
    assert set(labels[kept]) == set(labels[aside]) == set(range(len(counts)))
    if isinstance(validation, int):
        assert len(aside) == validation


@given(st.integers(2, 10), st.integers(10, 100), st.sampled_from([0.1, 0.2, 0.5]))
def test_classes_of_one_size_give_the_same_share(classes: int, size: int, share: float) -> None:
    labels = labels_of([size] * classes, 0)
    _, aside = stratify(labels, names_of([size] * classes), share, 0)
    assert np.bincount(labels[aside]) == pytest.approx(share * size, abs=1)


def test_a_rare_class_keeps_its_share_where_rounding_would_take_it() -> None:
    labels = labels_of([1000, 2], 0)
    kept, aside = stratify(labels, ("many", "few"), 0.1, 0)
    assert np.bincount(labels[aside]).tolist() == [99, 1]
    assert np.bincount(labels[kept]).tolist() == [901, 1]


def test_the_seed_decides() -> None:
    labels = labels_of([50, 50], 0)
    first, again, other = (stratify(labels, ("a", "b"), 0.2, seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_a_class_with_one_picture_is_named() -> None:
    with pytest.raises(DatasetError, match="class 'b' has 1 picture"):
        stratify(np.array([0, 0, 0, 1]), ("a", "b"), 0.5, 0)


@pytest.mark.parametrize("count", [1, 5])
def test_a_number_that_leaves_a_class_out_is_refused(count: int) -> None:
    with pytest.raises(DatasetError, match=f"validation {count} of 6 pictures: 2 classes need 2 to 4"):
        stratify(np.array([0, 0, 0, 1, 1, 1]), ("a", "b"), count, 0)
