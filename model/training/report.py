"""The report of a training run: its model card, by the template beside this file, and what it ran on."""

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
from model.evaluation.evaluate import Evaluation

CONFUSION_FILE: Final = "confusion_matrix.csv"
_MARKUP: Final = re.compile(r"[\\`*_\[\]|#!]")
_LISTED_CLASSES: Final = 20
"""Up to this many classes are named in the card's first sentence."""
_TABLED_CLASSES: Final = 100
"""Up to this many have a line each in its table; of more, the worst `_LISTED_CLASSES`."""


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
    with (out / CONFUSION_FILE).open("w", newline="", encoding="utf-8") as file:
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
