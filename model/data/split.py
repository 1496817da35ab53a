"""The stratified validation split, which takes the same share of every class."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model.errors import DatasetError


def stratify(
    labels: NDArray[np.int64], names: tuple[str, ...], validation: int | float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split pictures into (training, validation); each class is on both sides.

    Args:
        labels: int64 [N].
        names: of the classes, each of which has a picture.
        validation: number of pictures, or share of them (rounded; at least one a class).
        seed: decides which pictures.

    Returns:
        Two ascending arrays of indices into `labels`.

    Raises:
        DatasetError: a class with one picture, or a number that leaves a class without a picture on one side.
    """
    counts = np.bincount(labels, minlength=len(names))
    for name, count in zip(names, counts, strict=True):
        if count < 2:
            raise DatasetError(f"class {name!r} has {count} picture: it needs one to train on and one to validate on")
    total, classes = len(labels), len(names)
    wanted = validation
    if isinstance(wanted, float):
        wanted = min(max(round(wanted * total), classes), total - classes)
    if not classes <= wanted <= total - classes:
        raise DatasetError(
            f"validation {validation} of {total} pictures: {classes} classes need {classes} to {total - classes}"
        )
    generator = np.random.default_rng(seed)
    chosen = np.zeros(total, bool)
    for label, count in enumerate(_apportion(counts, wanted)):
        members = np.flatnonzero(labels == label)
        chosen[generator.permutation(members)[:count]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def _apportion(counts: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """Return the number of each class: in proportion, at least one, never all, `wanted` in total."""
    quota = wanted * counts / counts.sum()
    given: NDArray[np.int64] = np.clip(quota.astype(np.int64), 1, counts - 1)
    while given.sum() < wanted:
        given[np.argmax(np.where(given < counts - 1, quota - given, -np.inf))] += 1
    while given.sum() > wanted:
        given[np.argmax(np.where(given > 1, given - quota, -np.inf))] -= 1
    return given
