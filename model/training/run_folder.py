"""The folder of a run: checks before the run, and what is written beside the model; its card by a template."""

from __future__ import annotations

import csv
import html
import platform
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from model.checkpoint import Checkpoint
from model.errors import TrainingError
from model.evaluation.evaluate import Evaluation

CARD_FILE: Final = "MODEL_CARD.md"
_MARKUP: Final = re.compile(r"[\\`*_\[\]|#!]")
# Up to this many classes are named in the card's first sentence.
_LISTED_CLASSES: Final = 20
# Up to this many have a line each in its table; of more, the worst `_LISTED_CLASSES`.
_TABLED_CLASSES: Final = 100


def prepare_folder(out: Path, data: Path) -> None:
    """Make the folder of a run; raises TrainingError where it lies in the data, or holds something already."""
    if out.resolve().is_relative_to(data.resolve()):
        raise TrainingError(f"{out}: lies in the data, where it would be taken for a class; choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = min((path.name for path in out.iterdir()), default=None)
    except OSError as error:
        raise TrainingError(f"{out}: cannot be made: {error.strerror}") from error
    if there is not None:
        raise TrainingError(f"{out}: is not empty ({there}); choose another folder")


def model_card(run: dict[str, Any], checkpoint: Checkpoint) -> str:
    """Fill a run's record (see `model.training.train.run`) in `model_card.md.jinja`."""
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
        writer.writerow(["truth", *labels])
        writer.writerows([label, *row] for label, row in zip(labels, measured.confusion, strict=True))


def describe_device(device: torch.device) -> str:
    """Return the name of a device: `NVIDIA H100 80GB HBM3`, or `x86_64, 2 threads`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the numbers."""
    packages = ("vitserve", "torch", "numpy", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
