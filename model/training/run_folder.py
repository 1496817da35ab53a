"""The folder of a run: checks before the run, its lock, and the records made when the run begins."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from model.data.datasets import Dataset, FolderDataset
from model.errors import TrainingError
from model.training.loop import STATE_FILE
from model.training.recipe import Recipe, to_toml
from model.training.state import METRICS_FILE

RECIPE_FILE: Final = "recipe.toml"
SPLIT_FILE: Final = "split.csv"
CARD_FILE: Final = "MODEL_CARD.md"
LAST_FOLDER: Final = "last"
_LEFT_BEFORE_FIRST_EPOCH: Final = frozenset({RECIPE_FILE, SPLIT_FILE, METRICS_FILE})
"""What a run that was ended before its first epoch may have left behind."""


def prepare_folder(out: Path, dataset: Dataset, data: Path, *, resume: bool) -> None:
    """Make the folder of a run, and check that a run may begin or resume in it.

    Raises:
        TrainingError: it lies in the data, holds something already, or nothing that could be resumed.
    """
    if isinstance(dataset, FolderDataset) and out.resolve().is_relative_to(data.resolve()):
        raise TrainingError(f"{out}: lies in the data, where it would be taken for a class; choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in out.iterdir()}
    except OSError as error:
        raise TrainingError(f"{out}: cannot be made: {error.strerror}") from error
    if resume:
        if not there & {STATE_FILE, RECIPE_FILE}:
            raise TrainingError(f"{out}: nothing to resume: no {STATE_FILE}")
    elif STATE_FILE in there:
        raise TrainingError(f"{out}: holds a run already; resume it or choose another folder")
    elif others := there - _LEFT_BEFORE_FIRST_EPOCH:
        raise TrainingError(f"{out}: is not empty ({min(others)}); choose another folder")


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; the kernel lets go of it however the process ends.

    The folder itself is locked, so that no file is left behind.

    Raises:
        TrainingError: another process holds it, or its file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"{folder}: another run is writing here; wait, or choose another folder") from None
        except OSError as error:
            raise TrainingError(f"{folder}: cannot be locked: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)


def record_start(out: Path, recipe: Recipe, dataset: Dataset, *, resume: bool) -> None:
    """Write recipe and split down or, where a run is resumed, check that the split is still the same.

    Raises:
        TrainingError: the pictures or their split are not those that the run began with; or nothing can be written.
    """
    split = dataset.split_csv()
    resumed = resume and (out / STATE_FILE).exists()
    try:
        if split is not None:
            path = out / SPLIT_FILE
            if resumed and path.exists() and path.read_text(encoding="utf-8") != split:
                raise TrainingError(f"{path}: the data now hold other files, or split them otherwise; start afresh")
            write_text(path, split)
        if not resumed:  # else the state says whether this recipe is the same
            write_text(out / RECIPE_FILE, to_toml(recipe))
    except OSError as error:
        raise TrainingError(f"{out}: cannot be written to: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new text, whole."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
