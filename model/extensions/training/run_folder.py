"""The folder of a run: checks before the run, the files of the run, and its model card.

Each file is whole or absent, even if the process is killed. A state to resume never contains code.
"""

import csv
import html
import pickle
import platform
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from model.checkpoint import Checkpoint
from model.errors import TrainingError
from model.extensions.datasets.split_record import SPLIT_FILE, SplitRecord
from model.extensions.evaluation.evaluate import Evaluation
from model.extensions.training.recipe import Recipe
from model.label_texts import table_cell

STATE_FILE: Final = "last.pt"
METRICS_FILE: Final = "metrics.csv"
RECIPE_FILE: Final = "recipe.json"
CARD_FILE: Final = "MODEL_CARD.md"
_MARKUP: Final = re.compile(r"[\\`*_\[\]|#!]")
# Most classes that the card's first sentence names.
_LISTED_CLASSES: Final = 20
# With more classes than this, the card's table has only the worst `_LISTED_CLASSES`.
_TABLED_CLASSES: Final = 100
# Files of a run that ended before its first epoch.
_LEFT_BEFORE_FIRST_EPOCH: Final = frozenset({RECIPE_FILE, SPLIT_FILE})


# A row of `metrics.csv`, by the names of its columns:
#
#   epoch: counted from 1.
#   learning_rate: AdamW's rate for the head at the epoch's last step.
#   train_loss, train_accuracy: means over the epoch's augmented images; a mixed image counts for
#       its own, unmixed label.
#   validation_loss, validation_accuracy: without augmentation or smoothing.
#   images_per_second: of training alone.
#   seconds: wall time of the run with evaluation, without interruptions and the teacher.
EpochMetrics = dict[str, float]


def prepare_folder(out: Path, data: Path, *, resume: bool) -> None:
    """Create the folder of a run, and check that a run may begin or resume in it.

    Raises:
        TrainingError: the folder is inside the data, is not empty, or lacks a run to resume.
    """
    if out.resolve().is_relative_to(data.resolve()):
        raise TrainingError(
            f"{out}: is inside the data and would become a class; choose another folder"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in out.iterdir()}
    except OSError as error:
        raise TrainingError(f"{out}: cannot be made: {error.strerror}") from error
    if resume and not there & {STATE_FILE, RECIPE_FILE}:
        raise TrainingError(f"{out}: nothing to resume: no {STATE_FILE}")
    if not resume and STATE_FILE in there:
        raise TrainingError(f"{out}: holds a run already; resume it or choose another folder")
    others = there - _LEFT_BEFORE_FIRST_EPOCH
    if not resume and others:
        raise TrainingError(f"{out}: is not empty ({min(others)}); choose another folder")


def record_start(out: Path, recipe: Recipe, split: SplitRecord) -> None:
    """Write the recipe and the split; if the run is resumed, check that the split is unchanged.

    Raises:
        TrainingError: the pictures or their split have changed since the start of the run; or a
            file cannot be written.
    """
    path = out / SPLIT_FILE
    begun: str | None = None
    try:
        if (out / STATE_FILE).exists() and path.exists():
            begun = path.read_text(encoding="utf-8")
        if begun is not None and not split.has_same_split(begun):
            raise TrainingError(
                f"{path}: the data now hold other files, or split them otherwise; start afresh"
            )
        if begun is None or SplitRecord.parse(begun) is None:
            write_text(path, split.text())
        write_text(out / RECIPE_FILE, recipe.model_dump_json(indent=2))
    except OSError as error:
        raise TrainingError(f"{out}: cannot be written to: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write the whole text of a file."""
    with _replaced(path) as part:
        part.write_text(text, encoding="utf-8")


def write_metrics(folder: Path, history: Sequence[EpochMetrics]) -> None:
    """Write `metrics.csv`."""
    with (
        _replaced(folder / METRICS_FILE) as part,
        part.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, history[0] if history else ())
        writer.writeheader()
        writer.writerows(history)


def write_state(folder: Path, recipe: Recipe, state: dict[str, Any]) -> None:
    """Replace the state on disk."""
    with _replaced(folder / STATE_FILE) as part:
        torch.save({"recipe": recipe.model_dump_json(), **state}, part)


def read_state(folder: Path, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Read the state that `write_state` wrote.

    Args:
        recipe: the run's recipe, which the state's must equal.
        device: device for the tensors.

    Raises:
        TrainingError: the state is missing, unreadable, or of another recipe.
    """
    path = folder / STATE_FILE
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's remarks on pickles that it refuses
            state: object = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise TrainingError(f"{path}: nothing to resume: {error.strerror}") from error
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        # Torch's own message advises to load it without the protection against code.
        raise TrainingError(
            f"{path}: not a training state, or damaged; start afresh in another folder"
        ) from error
    if not isinstance(state, dict) or state.get("recipe") != recipe.model_dump_json():
        raise TrainingError(
            f"{path}: made with another recipe; resume with that recipe or start in another folder"
        )
    return state


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Yield a path to write to; its file then replaces the file at `path` atomically."""
    part = path.with_name(f"{path.name}.part")
    yield part
    part.replace(path)


def model_card(run: dict[str, Any], checkpoint: Checkpoint) -> str:
    """Fill a run's record (see `model.extensions.training.train.run`) in `model_card.md.jinja`."""
    split = "validation" if run["test"] is None else "test"
    tabled = list(run[split]["per_class"].items())
    if len(tabled) > _TABLED_CLASSES:
        tabled = sorted(tabled, key=lambda row: row[1])[:_LISTED_CLASSES]
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"fmt": format, "escaped": _text, "quoted": shlex.quote}
    return templates.get_template("model_card.md.jinja").render(
        run=run,
        recipe=run["recipe"],
        measured=run[split],
        split=split,
        checkpoint=checkpoint,
        config=checkpoint.config,
        preprocess=checkpoint.preprocess,
        listed_classes=_LISTED_CLASSES,
        tabled=tabled,
    )


def _text(name: str) -> str:
    """Escape a name that comes from outside, so that Markdown shows it as it is."""
    return _MARKUP.sub(r"\\\g<0>", html.escape(name, quote=False))


def write_confusion(out: Path, measured: Evaluation, labels: Sequence[str]) -> None:
    """Write the confusion matrix as CSV: a row a class, a column an answer."""
    with (out / "confusion_matrix.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        cells = list(map(table_cell, labels))
        writer.writerow(["truth", *cells])
        writer.writerows([cell, *row] for cell, row in zip(cells, measured.confusion, strict=True))


def describe_device(device: torch.device) -> str:
    """Return the name of a device: `NVIDIA H100 80GB HBM3`, or `x86_64, 2 threads`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the numbers."""
    packages = ("vitserve", "torch", "numpy", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
