"""A new head on the features of a checkpoint that stays as it is, from a folder of pictures.

    data -> features, once -> head (see `model.probe`) -> config, weights, confusion matrix

Features are what the head reads, so the new head takes the old one's place.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from model.calibration import Fit, choose_fit, scores_and_energies
from model.checkpoint import Checkpoint, native
from model.data.datasets import open_dataset
from model.data.pictures import decode
from model.errors import DatasetError
from model.evaluation.evaluate import Evaluation, measure, predict_embeddings
from model.heads import Head
from model.probe import fit_head, interval
from model.runtime.predictor import Predictor
from model.training.recipe import Recipe
from model.training.train import (
    STORED_DTYPE,
    installed_versions,
    prepare_folder,
    read_start,
    relabelled,
    rounded,
    write_confusion,
)

logger = logging.getLogger(__name__)


def run(data: Path, out: Path, recipe: Recipe, *, device: str = "auto") -> Evaluation:
    """Fit a head to a folder of pictures, leave a servable folder, and return what was measured on held-out pictures.

    Args:
        data, out, device: see `model.training.train.run`.
        recipe: names the model, the checkpoint with its size and preprocessing, and the precision of its features; the
            seed decides the folds. Fields on training are not used.

    Raises:
        DatasetError: the data cannot be read, or a class has less than two pictures that can; others are left out.
        CheckpointError: the checkpoint cannot be read, or is no Vision Transformer.
        DeviceError: the device is not available here.
        TrainingError: `out` holds something already.
    """
    began = time.monotonic()
    dataset = open_dataset(data, recipe.validation, recipe.seed)
    prepare_folder(out, data)
    start = rounded(read_start(recipe))
    dtype, threads = recipe.precision, recipe.threads or None
    predictor = Predictor(start, device=device, dtype=dtype, compile_mode="off", threads=threads, streams=1)
    parts = [decode(files, start.preprocess, leave_out=True) for files in (dataset.train, dataset.validation)]
    counts = np.bincount(np.concatenate([part.labels for part in parts]), minlength=len(dataset.labels))
    if counts.min() < 2:
        raise DatasetError(f"class {dataset.labels[counts.argmin()]!r}: less than two of its pictures can be read")
    features = np.concatenate([predict_embeddings(predictor, part.pixels) for part in parts])
    truth = np.concatenate([part.labels for part in parts])
    sizes = len(dataset.labels), len(truth), features.shape[1], start.name, time.monotonic() - began
    logger.info("%s: %d classes, %d pictures; %d features of %s after %.0f s", data, *sizes)

    folds = np.repeat(np.array([-1, 0]), [len(part) for part in parts]) if dataset.own_validation else None
    fitted, choice = fit_head(features, truth, dataset.labels, folds, seed=recipe.seed)
    weight, bias = (torch.from_numpy(part).to(STORED_DTYPE).float().numpy() for part in (fitted.weight, fitted.bias))
    head = replace(fitted, weight=weight, bias=bias)
    split, logits, labels = "held-out", choice.logits, truth[choice.rows]
    if dataset.test is not None:
        test = decode(dataset.test, start.preprocess, leave_out=True)
        scored = head.logits(predict_embeddings(predictor, test.pixels))
        split, logits, labels = "test", scored, test.labels
    fit, _ = choose_fit(choice.logits, truth[choice.rows], Fit(choice.temperature))
    measured = measure(scores_and_energies(logits, *fit)[0].astype(np.float32), labels, dataset.labels)
    logger.info("%s", _in_words(measured, split))

    served = with_head(start, head)
    served = replace(served, name=recipe.name, source=str(out), temperature=fit.temperature, form=fit.form)
    served.network()  # names, shapes and values of the weights are checked here
    write_confusion(out, measured, dataset.labels)
    record = {
        "probe_of": start.name,
        "data": dataset.name,
        "images": len(features),
        "penalty": choice.penalty,
        "seed": recipe.seed,
        split: measured.record(),
        "seconds": time.monotonic() - began,
        "device": predictor.device,
        "versions": installed_versions(),
    }
    native.write(out, served, dtype=STORED_DTYPE, training=record)
    logger.info("%s: done after %.0f s; the confusion matrix is in %s", data, time.monotonic() - began, out)
    return measured


def with_head(checkpoint: Checkpoint, head: Head) -> Checkpoint:
    """Return a Vision Transformer with another head; one of two layers, or of cosines, becomes a linear one.

    A distilled model's two heads get the same one: the mean of their logits is then the head's logits of the mean of
    their tokens, which is the embedding.
    """
    config = checkpoint.vit.model_copy(
        update={"num_classes": len(head.labels), "head_width": None, "normalized_head": False}
    )
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith("pre_logits.")}
    for name in ("head", "head_dist") if config.distillation_head else ("head",):
        tensors |= {f"{name}.{kind}": torch.from_numpy(getattr(head, kind)) for kind in ("weight", "bias")}
    return relabelled(checkpoint, config, head.labels, tensors)


def _in_words(measured: Evaluation, split: str) -> str:
    """Return the accuracy with its interval of confidence."""
    count, share = measured.count, measured.accuracy
    low, high = interval(round(share * count), count)
    sure = f"for pictures like these {low:.1%} to {high:.1%}, with 95% confidence"
    return f"{share:.2%} of {count} {split} pictures right ({sure})"
