"""The model card: a trained checkpoint's description, origin and limits of use."""

from __future__ import annotations

import html
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, Final

from model.checkpoint import Checkpoint
from model.config import Size
from model.evaluation.evaluate import Evaluation
from model.training.report.figures import CALIBRATION, CONFUSION_MATRIX, FOLDER, LEARNING_CURVE
from model.training.report.recipe_section import recipe_lines
from model.training.run_record import RunRecord

_TEMPLATE: Final = Path(__file__).with_name("model_card.md")
_TEXTS: Final[Mapping[str, Any]] = tomllib.loads(_TEMPLATE.with_suffix(".toml").read_text(encoding="utf-8"))
_ROBUSTNESS: Final = "## Robustness\n\n"
_LICENCE: Final = "## Licence\n"
"""The card's last heading."""
_MARKUP: Final = re.compile(r"[\\`*_\[\]|#!]")
_LISTED_CLASSES: Final = 20
"""Up to this many classes are named in the card's first sentence."""
_TABLED_CLASSES: Final = 100
"""Up to this many have a line each in its table."""


def model_card(run: RunRecord, checkpoint: Checkpoint, figures: Sequence[str] = ()) -> str:
    """Fill `model_card.md` and the sentences of `model_card.toml`, both beside this file, in with a run's measurements.

    `figures` are the names of the pictures that `write_figures` drew beside the card.
    """
    texts = _TEXTS["data"].get(run.data, _TEXTS["data"]["folder"])
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        {name: Template(text).substitute(name=run.data) for name, text in texts.items()}
        | _model_fields(checkpoint)
        | _run_fields(run)
        | _result_fields(run, figures)
    )


def _model_fields(checkpoint: Checkpoint) -> dict[str, str]:
    config, preprocess = checkpoint.config, checkpoint.preprocess
    named = config.num_classes <= _LISTED_CLASSES
    return {
        "name": _text(checkpoint.name),
        "out": shlex.quote(f"runs/{checkpoint.name}"),
        "classes": str(config.num_classes),
        "class_names": f": {', '.join(map(_text, checkpoint.labels))}" if named else "",
        "input": f"{_size(config.image_size)} pixels{' RGB' if config.in_channels == 3 else ''}",
        "architecture": checkpoint.architecture,
        **{name: str(getattr(config, name)) for name in ("width", "depth", "heads", "mlp_width", "patch_size")},
        "pooling": _TEXTS["pooling"][config.pool],
        "resize": preprocess.resize,
        "resize_size": _size(preprocess.resize_size),
        "interpolation": preprocess.interpolation,
        "crop_size": _size(preprocess.size),
        "mean": _numbers(preprocess.mean),
        "std": _numbers(preprocess.std),
    }


def _run_fields(run: RunRecord) -> dict[str, str]:
    origin, statistics_origin = "trained from scratch", "measured on the training images"
    if run.started_from is not None:
        origin = f"fine-tuned from `{run.started_from.replace('`', '')}`"
        statistics_origin = "the original checkpoint's"
    return {
        "origin": origin,
        "statistics_origin": statistics_origin,
        "parameters": f"{run.parameters:,}",
        "duration": _duration(run.seconds),
        "device": run.device,
        "precision": run.precision,
        "versions": ", ".join(f"{name} {number}" for name, number in run.versions.items()),
        "data_split": _split(run),
        "schedule": _schedule(run),
        "recipe": "\n".join(f"- {line}" for line in recipe_lines(run.recipe)),
        "reproducibility": _reproducibility(run),
    }


def _result_fields(run: RunRecord, figures: Sequence[str]) -> dict[str, str]:
    measured, split = run.measured, "validation" if run.test is None else "test"
    return {
        "split": split,
        "split_title": split.capitalize(),
        "accuracy": f"{measured.accuracy:.2%}",
        "count": f"{measured.count:,}",
        "calibration_error": f"{measured.calibration_error:.2%}",
        "results": _results(run),
        "temperature": _TEXTS["temperature"]["not_fitted" if run.temperature == 1 else "fitted"],
        "per_class": _per_class(measured, split),
        "learning_curve": _picture(figures, LEARNING_CURVE, "Loss and accuracy by epoch"),
        "calibration_figure": _picture(figures, CALIBRATION, f"Accuracy by confidence on the {split} images"),
        "confusion_matrix": _picture(figures, CONFUSION_MATRIX, f"Confusion matrix of the {split} images"),
    }


def with_robustness(card: str, accuracies: Mapping[str, float], count: int) -> str:
    """Return a card with a section on `count` pictures as users send them; one that is there already is replaced.

    `accuracies` are by what was done to the pictures, untouched ones first.
    """
    first = next(iter(accuracies.values()))
    rows = "\n".join(
        f"| {name} | {accuracy:.2%} | {100 * (accuracy - first):+.2f} |" for name, accuracy in accuracies.items()
    )
    section = Template(_TEXTS["robustness"]["section"]).substitute(count=f"{count:,}", rows=rows)
    if _ROBUSTNESS in card:
        before, _, after = card.partition(_ROBUSTNESS)
        _, heading, rest = after.partition("\n## ")
        card = before + heading.lstrip("\n") + rest
    before, licence, after = card.rpartition(_LICENCE)
    return before + section + licence + after if licence else f"{card.rstrip()}\n\n{section.rstrip()}\n"


def _split(run: RunRecord) -> str:
    return Template(_TEXTS["data_split"]["without_test" if run.test is None else "with_test"]).substitute(
        images=f"{run.images:,}",
        total=f"{run.images + run.validation_images:,}",
        validation_images=f"{run.validation_images:,}",
        test_images="" if run.test is None else f"{run.test.count:,}",
        fitted="" if run.temperature == 1 else ", and for fitting the temperature",
    )


def _schedule(run: RunRecord) -> str:
    recipe = run.recipe
    limit = "" if recipe.minutes is None else f", ended by the recipe's limit of {recipe.minutes:g} minutes"
    kept = f"; the weights after epoch {run.kept_epoch} are kept" if recipe.keep == "best" else ""
    return f"{run.epochs:.2f} epochs of batches of {recipe.batch_size}{limit}; seed {recipe.seed}{kept}."


def _results(run: RunRecord) -> str:
    if run.temperature == 1:
        rows = [("Validation", run.validation), ("**Test**", run.test)]
    else:
        rows = [
            ("Validation, temperature 1", run.validation_uncalibrated),
            (f"Validation, temperature {run.temperature:.3f}", run.validation),
            ("Test, temperature 1", run.test_uncalibrated),
            (f"**Test, temperature {run.temperature:.3f}**", run.test),
        ]
    return "\n".join(_row(name, measured) for name, measured in rows if measured is not None)


def _row(name: str, measured: Evaluation) -> str:
    return (
        f"| {name} | {measured.count:,} | {measured.accuracy:.2%} "
        f"| {measured.loss:.4f} | {measured.calibration_error:.4f} |"
    )


def _per_class(measured: Evaluation, split: str) -> str:
    """Return a table of all classes or, where they are too many to read, of the worst; the record has all."""
    rows = list(measured.per_class.items())
    note = ""
    if len(rows) > _TABLED_CLASSES:
        rows = sorted(rows, key=lambda row: row[1])[:_LISTED_CLASSES]
        note = f"\n\nThe {_LISTED_CLASSES} worst of {len(measured.per_class):,}; `config.json` has all of them."
    table = "\n".join(f"| {_text(label)} | {accuracy:.1%} |" for label, accuracy in rows)
    return f"| Class | {split.capitalize()} accuracy |\n|---|---|\n{table}{note}"


def _text(name: str) -> str:
    """Escape a name that comes from outside, so that Markdown shows it as it is."""
    return _MARKUP.sub(r"\\\g<0>", html.escape(name, quote=False))


def _picture(figures: Sequence[str], name: str, caption: str) -> str:
    """Return an image by relative link with blank lines around it, or nothing if it was not drawn."""
    return f"\n![{caption}]({FOLDER}/{name})\n" if name in figures else ""


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _size(size: Size) -> str:
    return f"{size[0]} x {size[1]}"


def _numbers(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"


def _reproducibility(run: RunRecord) -> str:
    if run.recipe.minutes is None:
        return str(_TEXTS["reproducibility"]["by_epochs"])
    text = Template(_TEXTS["reproducibility"]["by_time"])
    return text.substitute(minutes=f"{run.recipe.minutes:g}", epochs=run.recipe.epochs)
