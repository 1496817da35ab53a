"""The model card: what a bundled checkpoint is, how it came about, and what it is not for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.checkpoint import Checkpoint
from model.training.evaluate import Evaluation

if TYPE_CHECKING:
    from model.training.train import Run


def model_card(run: Run, checkpoint: Checkpoint) -> str:
    """Markdown, from a run's own measurements.

    Args:
        run: what happened.
        checkpoint: what came of it.
    """
    recipe, config, preprocess = run.recipe, checkpoint.config, checkpoint.preprocess
    rows, columns = config.image_size
    optimiser, augmentation = recipe.optimiser, recipe.augmentation
    limit = "" if recipe.minutes is None else f", ended by the recipe's limit of {recipe.minutes:g} minutes"
    muon = f", Muon for the blocks' matrices at {optimiser.muon_learning_rate:g}" if optimiser.name == "muon" else ""
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    per_class = "\n".join(f"| {label} | {accuracy:.1%} |" for label, accuracy in run.test.per_class.items())
    return f"""# {checkpoint.name}

A plain Vision Transformer that sorts small colour pictures into the {config.num_classes} classes of CIFAR-10:
{", ".join(checkpoint.labels)}.

| | |
|---|---|
| Test accuracy (top-1) | **{run.test.accuracy:.2%}** of {run.test.count:,} images |
| Parameters | {run.parameters:,} |
| Input | {rows} x {columns} pixels RGB; any picture is resized by its shorter side and its centre cut out |
| Training time | {run.seconds / 60:.1f} minutes on {run.device} |
| Stored as | safetensors, float16 |

## What it is for

Trying vitserve out, tests, and teaching: it starts in seconds and needs no download.

**Not for** decisions about people or anything that costs if wrong. It knows {config.num_classes} classes and nothing
else: a picture of something else gets one of them all the same, often with a high score. Every picture is shrunk
to {rows} x {columns} pixels before the model sees it, and the model has only ever seen pictures that were that small
from the start, mostly with one object that fills them; on photographs its accuracy is lower than the figure above.

## Data

CIFAR-10 (Alex Krizhevsky, *Learning Multiple Layers of Features from Tiny Images*, 2009,
<https://www.cs.toronto.edu/~kriz/cifar.html>), binary version. Its page asks users to cite that report and states no
licence; the pictures were collected from the web and their rights stay with their owners. The checkpoint contains
none of them.

{run.images:,} of the 50,000 training images were trained on; {run.held_out_images:,}, chosen with the recipe's seed,
were held out for choosing the recipe and fitting the temperature. The 10,000 test images were read once, when weights
and temperature were fixed.

## Architecture

Width {config.width}, {config.depth} blocks, {config.heads} heads, MLP width {config.mlp_width}, patches of
{config.patch_size} x {config.patch_size} pixels, pooling by {"CLS token" if config.pool == "cls" else "mean"}
(`{checkpoint.architecture}`). Dosovitskiy et al. 2020, <https://arxiv.org/abs/2010.11929>.

Preprocessing: shorter side to {preprocess.resize_size[0]} pixels ({preprocess.interpolation}), centre crop, mean
{_numbers(preprocess.mean)}, standard deviation {_numbers(preprocess.std)} (measured on the training images).

## Training

- {run.epochs:.2f} epochs of batches of {recipe.batch_size}{limit}; seed {recipe.seed}.
- {"AdamW" if optimiser.name == "adamw" else "AdamW and Muon"}: AdamW at {optimiser.learning_rate:g}{muon};
  weight decay {optimiser.weight_decay:g}; warm-up over {optimiser.warmup:.0%} of the schedule, then a cosine to zero.
- Random shifts by up to {augmentation.crop_padding} pixels{" and mirroring" if augmentation.flip else ""}; label
  smoothing {recipe.label_smoothing:g}; stochastic depth {recipe.drop_path:g}.
- Position embeddings start {"at a sine-cosine code" if recipe.initialisation.positions == "sincos" else "random"};
  patch embedding starts {"at whitening filters" if recipe.initialisation.whiten_patches else "random"}; both learned.
- Arithmetic in {run.precision}, float32 master weights.
- {run.device}; {versions}.

To make it again (all settings are in the recipe, which `config.json` repeats under `training`):

```sh
vitserve train --data DIR --out runs/cifar10
```

{_reproducibility(run)}

`vitserve evaluate --data DIR` measures the accuracy again.

## Results

Of the weights as stored (float16), computed in float32. Other arithmetic may move a few images in ten thousand.

| | images | accuracy | loss (nats) | calibration error (ECE, 15 bins) |
|---|---|---|---|---|
{_row("Held-out, temperature 1", run.held_out_uncalibrated)}
{_row(f"Held-out, temperature {run.temperature:.3f}", run.held_out)}
{_row("Test, temperature 1", run.test_uncalibrated)}
{_row(f"**Test, temperature {run.temperature:.3f}**", run.test)}

The temperature (Guo et al. 2017, <https://arxiv.org/abs/1706.04599>) was fitted on the held-out images, is stored in
the checkpoint, and is applied to every score that the service gives.

| Class | Test accuracy |
|---|---|
{per_class}

## Licence

Apache-2.0, as vitserve itself; for the data see above.
"""


def _row(name: str, measured: Evaluation) -> str:
    return (
        f"| {name} | {measured.count:,} | {measured.accuracy:.2%} "
        f"| {measured.loss:.4f} | {measured.calibration_error:.4f} |"
    )


def _numbers(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"


def _reproducibility(run: Run) -> str:
    if run.recipe.minutes is None:
        return "On the same device with the same versions the result is the same; elsewhere it differs by rounding."
    return (
        f"The schedule ends after {run.recipe.minutes:g} minutes or {run.recipe.epochs} epochs, whichever comes first, "
        f"so a faster\nor less busy machine sees the images more often than here. The accuracy differs accordingly."
    )
