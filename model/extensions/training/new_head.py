"""A new head on the features of a checkpoint that stays as it is, from a folder of pictures.

    data -> features, once -> head (see `model.linear_probe`) -> config, weights, confusion matrix

Features are what the head reads, so the new head takes the old one's place.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from model.checkpoint import Checkpoint, native
from model.config import LibraryConfig, NetworkConfig, ViTConfig
from model.data.folders import TEST, TRAIN
from model.data.pictures import Images, PictureFiles, decode
from model.data.split_record import SPLIT_FILE, SplitRecord
from model.errors import CheckpointError, DatasetError, TrainingError
from model.extensions.evaluation.datasets import Dataset, open_dataset
from model.extensions.evaluation.evaluate import Evaluation, measure, predict_embeddings
from model.extensions.training.recipe import Recipe
from model.extensions.training.run_folder import (
    describe_device,
    installed_versions,
    prepare_folder,
    write_confusion,
    write_text,
)
from model.extensions.training.train import STORED_DTYPE, read_start, rounded
from model.heads import Head
from model.linear_probe import fit_head, interval
from model.network.library import library_config, linear_head
from model.runtime.device import choose_device
from model.runtime.predictor import Predictor
from model.score_fit import Fit, choose_fit, scores_and_energies

logger = logging.getLogger(__name__)

_ROUNDING: Final = 0.1
"""How far logits may lie from those of the embedding, relative to their norm: in bfloat16 some
percent.
"""


def run(data: Path, out: Path, recipe: Recipe, *, device: str = "auto") -> Evaluation:
    """Fit a head to a folder of pictures, leave a servable folder, and return what was measured on
    held-out pictures.

    Args:
        data, out, device: see `model.extensions.training.train.run`.
        recipe: names the model, the checkpoint with its size and preprocessing, and the precision
            of its features; the seed decides the folds. Fields on training are not used.

    Raises:
        DatasetError: the data cannot be read, or a class has less than two pictures that can;
        others are left out.
        CheckpointError: the checkpoint cannot be read, or its head cannot be replaced.
        DeviceError: the device is not available here.
        TrainingError: `out` holds something already.
    """
    began = time.monotonic()
    if recipe.checkpoint is None:
        raise TrainingError("recipe: checkpoint: a probe needs one, for its features")
    dataset = open_dataset(data, recipe.validation, recipe.seed)
    prepare_folder(out, data, resume=False)
    start = rounded(read_start(recipe, recipe.checkpoint))
    heads = head_names(start.config)
    dtype, threads = recipe.precision, recipe.threads or None
    predictor = Predictor(
        start, device=device, dtype=dtype, compile_mode="off", threads=threads, streams=1
    )
    parts = [
        decode(files, start.preprocess, out, leave_out=True)
        for files in (dataset.train, dataset.validation)
    ]
    counts = np.bincount(
        np.concatenate([part.labels for part in parts]), minlength=len(dataset.labels)
    )
    if counts.min() < 2:
        raise DatasetError(
            f"class {dataset.labels[counts.argmin()]!r}: less than two of its pictures can be read"
        )
    if isinstance(start.config, LibraryConfig):
        _require_linear(predictor, start.tensors, heads[0], parts[0])
    features = np.concatenate([predict_embeddings(predictor, part.pixels) for part in parts])
    truth = np.concatenate([part.labels for part in parts])
    sizes = len(dataset.labels), len(truth), features.shape[1], start.name, time.monotonic() - began
    logger.info("%s: %d classes, %d pictures; %d features of %s after %.0f s", data, *sizes)

    folds = (
        np.repeat(np.array([-1, 0]), [len(part) for part in parts])
        if dataset.own_validation
        else None
    )
    fitted, choice = fit_head(features, truth, dataset.labels, folds, seed=recipe.seed)
    weight, bias = (
        torch.from_numpy(part).to(STORED_DTYPE).float().numpy()
        for part in (fitted.weight, fitted.bias)
    )
    head = replace(fitted, weight=weight, bias=bias)
    split, logits, labels = "held-out", choice.logits, truth[choice.rows]
    if dataset.test is not None:
        test = decode(dataset.test, start.preprocess, out, leave_out=True)
        scored = head.logits(predict_embeddings(predictor, test.pixels))
        split, logits, labels = "test", scored, test.labels
    fit, _ = choose_fit(choice.logits, truth[choice.rows], Fit(choice.temperature))
    measured = measure(
        scores_and_energies(logits, *fit)[0].astype(np.float32), labels, dataset.labels
    )
    logger.info("%s", _in_words(measured, split))

    served = with_head(start, heads, head)
    served = replace(
        served, name=recipe.name, source=str(out), temperature=fit.temperature, form=fit.form
    )
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
        "device": describe_device(choose_device(device)),
        "versions": installed_versions(),
    }
    _write_split(out, dataset, recipe.checkpoint)
    native.write(out, served, dtype=STORED_DTYPE, training=record)
    logger.info(
        "%s: done after %.0f s; the confusion matrix is in %s", data, time.monotonic() - began, out
    )
    return measured


def _write_split(out: Path, dataset: Dataset, start: str) -> None:
    """Write down which pictures the served head is fitted to: also those that chose its penalty."""
    sets = {TRAIN: PictureFiles.joined(dataset.train, dataset.validation)}
    if dataset.test is not None:
        sets[TEST] = dataset.test
    write_text(out / SPLIT_FILE, SplitRecord.of(sets, SplitRecord.read(start)).text())


def head_names(config: NetworkConfig) -> tuple[str, ...]:
    """Return the names of the layers that a head is written to; a distilled model's two get the
    same one.

    The mean of their logits is then the head's logits of the mean of their tokens, which is the
    embedding.

    Raises:
        CheckpointError: a library's network does not end in one linear layer.
    """
    if isinstance(config, LibraryConfig):
        head = linear_head(config)
        if head is None:
            raise CheckpointError(
                f"{config.kind}: does not end in one linear layer, which another could take"
            )
        return (head,)
    return (
        ("head", "head_dist")
        if isinstance(config, ViTConfig) and config.distillation_head
        else ("head",)
    )


def with_head(checkpoint: Checkpoint, names: Sequence[str], head: Head) -> Checkpoint:
    """Return a checkpoint with another head; one of cosines becomes a linear one."""
    old, labels = checkpoint.config, head.labels
    tensors = dict(checkpoint.tensors)
    config: NetworkConfig
    if isinstance(old, LibraryConfig):
        sizes = len(labels), old.in_channels, old.image_size
        config = library_config(old.architecture, old.arguments, *sizes, fixed_size=old.fixed_size)
    else:
        config = old.model_copy(update={"num_classes": len(labels), "normalized_head": False})
    for name in names:
        tensors |= {
            f"{name}.{kind}": torch.from_numpy(getattr(head, kind)) for kind in ("weight", "bias")
        }
    return replace(
        checkpoint,
        format=native.FORMAT,
        config=config,
        labels=labels,
        tensors=tensors,
        multi_label=False,
        zero_shot=None,
        embed_texts=None,
    )


def _require_linear(
    predictor: Predictor, tensors: Mapping[str, Tensor], name: str, images: Images
) -> None:
    """Raise CheckpointError unless this layer of a library's network maps the embedding to the
    logits.
    """
    weight, bias = (tensors[f"{name}.{kind}"].numpy() for kind in ("weight", "bias"))
    few = images.pixels[:2]
    expected = predict_embeddings(predictor, few) @ weight.T + bias
    logits = predictor.logits(np.ascontiguousarray(few.transpose(0, 2, 3, 1)))
    if np.linalg.norm(logits - expected) > _ROUNDING * np.linalg.norm(expected):
        raise CheckpointError(
            f"{predictor.checkpoint.source}: {predictor.config.kind} reads more than its embedding"
        )


def _in_words(measured: Evaluation, split: str) -> str:
    """Return the accuracy with its interval of confidence."""
    count, share = measured.count, measured.accuracy
    low, high = interval(round(share * count), count)
    sure = f"for pictures like these {low:.1%} to {high:.1%}, with 95% confidence"
    return f"{share:.2%} of {count} {split} pictures right ({sure})"
