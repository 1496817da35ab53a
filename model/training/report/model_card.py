"""The model card: what a trained checkpoint is, how it came about, and what it is not for."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from model.checkpoint import Checkpoint
from model.evaluation.evaluate import Evaluation
from model.training.report import figures as card_figures
from model.training.report.data_section import DataDescription, describe
from model.training.report.recipe_section import recipe_lines
from model.training.run_record import RunRecord

_LISTED_CLASSES: Final = 20
"""Up to this many classes are named in the card's first sentence."""
_TABLED_CLASSES: Final = 100
"""Up to this many have a line each in its table."""


def model_card(
    run: RunRecord, checkpoint: Checkpoint, figures: Sequence[str] = (), *, data: DataDescription | None = None
) -> str:
    """Markdown, from a run's own measurements.

    Args:
        run: what happened.
        checkpoint: what came of it.
        figures: names of the pictures that `write_figures` drew beside it.
        data: what is known of the pictures it was trained on; None: what `describe` knows of `run.data`.
    """
    config, preprocess = checkpoint.config, checkpoint.preprocess
    data = data or describe(run.data)
    rows, columns = config.image_size
    measured, split = (run.validation, "validation") if run.test is None else (run.test, "test")
    origin = (
        "trained from scratch" if run.started_from is None else f"fine-tuned from `{run.started_from.replace('`', '')}`"
    )
    names = f": {', '.join(map(_text, checkpoint.labels))}" if config.num_classes <= _LISTED_CLASSES else ""
    recipe_flag = "" if data.bundled_recipe else " --recipe recipe.toml"
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    recipe = "\n".join(f"- {line}" for line in recipe_lines(run.recipe))
    return f"""# {_text(checkpoint.name)}

A Vision Transformer that sorts {data.pictures} into {config.num_classes} classes, {origin} on
{data.name}{names}.

| | |
|---|---|
| {split.capitalize()} accuracy (top-1) | **{measured.accuracy:.2%}** of {measured.count:,} images |
| Calibration error ({split}, ECE) | {measured.calibration_error:.2%} |
| Parameters | {run.parameters:,} |
| Input | {rows} x {columns} pixels{" RGB" if config.in_channels == 3 else ""} |
| Training time | {_duration(run.seconds)} on {run.device} |
| Stored as | safetensors, float16 |

## What it is for

{data.purpose}

**Must not be used for** decisions about people, or for anything where a wrong answer costs more than asking again:
no medical, legal, security, hiring, credit, surveillance or safety use. It knows {config.num_classes} classes and
nothing else: a picture of something else gets one of them all the same, often with a high score. {data.limits}

## Data

{data.source}

Terms: {data.terms}

{_split(run)}

## Architecture

Width {config.width}, {config.depth} blocks, {config.heads} heads, MLP width {config.mlp_width},
{config.patch_size} x {config.patch_size} pixel patches, pooling: {_POOLING[config.pool]}
(`{checkpoint.architecture}`). Dosovitskiy et al. 2020, <https://arxiv.org/abs/2010.11929>.

Preprocessing: {preprocess.resize} to {preprocess.resize_size[0]} x {preprocess.resize_size[1]} pixels
({preprocess.interpolation}), centre crop {preprocess.size[0]} x {preprocess.size[1]}, mean {_numbers(preprocess.mean)},
standard deviation {_numbers(preprocess.std)} ({_statistics(run)}).

## Training

- {_schedule(run)}
{recipe}
- Arithmetic in {run.precision}, float32 master weights.
- {run.device}; {versions}.

To make it again (all settings are in the recipe, which `config.json` repeats under `training`):

```sh
vitserve train --data DIR --out {shlex.quote(f"runs/{checkpoint.name}")}{recipe_flag}
```

{_reproducibility(run)}
{_picture(figures, card_figures.LEARNING_CURVE, "Loss and accuracy by epoch")}
## Results

Of the weights as stored (float16), computed in float32. Other arithmetic may move a few images in ten thousand.

| | images | accuracy | loss (nats) | calibration error (ECE, 15 bins) |
|---|---|---|---|---|
{_results(run)}

{_temperature(run)}
{_picture(figures, card_figures.CALIBRATION, f"Accuracy by confidence on the {split} images")}
{_per_class(measured, split)}
{_picture(figures, card_figures.CONFUSION_MATRIX, f"Confusion matrix of the {split} images")}
`vitserve evaluate --data DIR --dtype float32` measures the accuracy again; without `--dtype`, in the device's own
arithmetic.{_ROBUSTNESS_HINT if run.data == "CIFAR-10" else ""}

## Licence

{data.licence}
"""


def with_robustness(card: str, accuracies: Mapping[str, float], count: int) -> str:
    """The same card with a section on pictures as users send them; one that is there already is replaced.

    Args:
        card: as `model_card` writes it.
        accuracies: by what was done to the pictures, untouched ones first.
        count: pictures.
    """
    first = next(iter(accuracies.values()))
    rows = "\n".join(
        f"| {name} | {accuracy:.2%} | {100 * (accuracy - first):+.2f} |" for name, accuracy in accuracies.items()
    )
    section = f"""{_ROBUSTNESS}
The {count:,} test images as users send them, through the service's own preprocessing. Turned by Exif: orientations
3, 6 and 8 in turn. Measured by `vitserve evaluate --robustness`.

| | accuracy | points |
|---|---|---|
{rows}

"""
    if _ROBUSTNESS in card:
        before, _, after = card.partition(_ROBUSTNESS)
        _, heading, rest = after.partition("\n## ")
        card = before + heading.lstrip("\n") + rest
    before, licence, after = card.rpartition(_LICENCE)
    return before + section + licence + after if licence else f"{card.rstrip()}\n\n{section.rstrip()}\n"


_ROBUSTNESS_HINT: Final = """ With `--robustness`, also on the same pictures as users send them: enlarged and
compressed, turned, without colour."""

_ROBUSTNESS: Final = "## Robustness\n\n"
_LICENCE: Final = "## Licence\n"
"""The card's last heading."""

_POOLING: Final = {
    "cls": "CLS token",
    "mean": "mean",
    "max": "maximum",
    "mean_max": "half of mean plus maximum",
    "cls_mean": "CLS token and mean",
    "attention": "a learned query's attention",
}


def _split(run: RunRecord) -> str:
    total = run.images + run.validation_images
    fitted = "" if run.temperature == 1 else ", and for fitting the temperature"
    text = (
        f"{run.images:,} of {total:,} images were trained on; {run.validation_images:,} were held out for choosing "
        f"the\nrecipe and the weights{fitted}. "
    )
    if run.test is None:
        return text + (
            "There were no test images: the figures of this card are of\nimages that choices were made by, "
            "and are a little too good."
        )
    return text + (
        f"The {run.test.count:,} test images were\nread once, when weights, recipe and temperature were fixed; "
        "nothing was chosen by them."
    )


def _statistics(run: RunRecord) -> str:
    return "measured on the training images" if run.started_from is None else "the original checkpoint's"


def _schedule(run: RunRecord) -> str:
    recipe = run.recipe
    limit = "" if recipe.minutes is None else f", ended by the recipe's limit of {recipe.minutes:g} minutes"
    kept = f"; the weights after epoch {run.kept_epoch} are kept" if recipe.keep == "best" else ""
    return f"{run.epochs:.2f} epochs of batches of {recipe.batch_size}{limit}; seed {recipe.seed}{kept}."


def _temperature(run: RunRecord) -> str:
    if run.temperature == 1:
        return (
            "No temperature was fitted: the validation images are too few, or all of them are answered right.\n"
            "How far the scores can be trusted is not known."
        )
    return """The temperature (Guo et al. 2017, <https://arxiv.org/abs/1706.04599>) was fitted on the validation images,
is stored in the checkpoint, and is applied to every score that the service gives. It is the one whose top-1 scores are
the best estimate of whether the answer is right (Brier score), so the loss over all classes may move either way."""


def _results(run: RunRecord) -> str:
    if run.temperature == 1:
        plain = [("Held-out", run.validation), ("**Test**", run.test)]
        return "\n".join(_row(name, measured) for name, measured in plain if measured is not None)
    rows = [
        ("Held-out, temperature 1", run.validation_uncalibrated),
        (f"Held-out, temperature {run.temperature:.3f}", run.validation),
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
    """A table of all classes; where they are too many to read, of the worst, all being in the record."""
    rows = list(measured.per_class.items())
    note = ""
    if len(rows) > _TABLED_CLASSES:
        rows = sorted(rows, key=lambda row: row[1])[:_LISTED_CLASSES]
        note = f"\n\nThe {_LISTED_CLASSES} worst of {len(measured.per_class):,}; `config.json` has all of them."
    table = "\n".join(f"| {_text(label)} | {accuracy:.1%} |" for label, accuracy in rows)
    return f"| Class | {split.capitalize()} accuracy |\n|---|---|\n{table}{note}"


def _text(name: str) -> str:
    """A name that comes from outside, as text of a Markdown page and nothing else."""
    return _MARKUP.sub(r"\\\g<0>", html.escape(name, quote=False))


_MARKUP: Final = re.compile(r"[\\`*_\[\]|#!]")


def _picture(figures: Sequence[str], name: str, caption: str) -> str:
    """An image by relative link, with blank lines around it; nothing if it was not drawn."""
    return f"\n![{caption}]({card_figures.FOLDER}/{name})\n" if name in figures else ""


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _numbers(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"


def _reproducibility(run: RunRecord) -> str:
    if run.recipe.minutes is None:
        return (
            "Another device, or another version of vitserve or of a library, rounds otherwise: the result then ends\n"
            "some tenths of a percent higher or lower, as another seed does."
        )
    return (
        f"The schedule ends after {run.recipe.minutes:g} minutes or {run.recipe.epochs} epochs, whichever comes first, "
        f"so a faster\nor less busy machine sees the images more often than here. The accuracy differs accordingly."
    )
