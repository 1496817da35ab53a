"""A new head on the features of a frozen checkpoint, fitted to a folder of pictures.

    data -> features, once -> head -> config, weights, confusion matrix

A Vision Transformer's new head reads transfer features (see `model.network.transfer`). A head of
another library's network reads the features of its old head.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.calibration import Fit
from model.checkpoint import Checkpoint, native
from model.config import LibraryConfig, NetworkConfig, ViTConfig
from model.errors import CheckpointError, DatasetError, TrainingError
from model.extensions.datasets.pictures import Images, decode
from model.extensions.datasets.split_names import TEST, VALIDATION
from model.extensions.datasets.split_record import SPLIT_FILE, SplitRecord
from model.extensions.evaluation.datasets import Dataset, open_dataset
from model.extensions.evaluation.evaluate import Evaluation, measure, predict_embeddings
from model.extensions.taught.linear_probe import Choice, fit_head, interval
from model.extensions.taught.score_fit import choose_fit
from model.extensions.taught.taught_heads import Features
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
from model.network.library import library_config, linear_head
from model.network.vit import meta_model
from model.outputs import RequestedOutputs, transfer_pool
from model.runtime.device import choose_device
from model.runtime.predictor import Predictor

logger = logging.getLogger(__name__)

# Largest difference between the logits of the network and of its last layer, relative to their
# norm. In bfloat16 the difference is some percent.
_ROUNDING: Final = 0.1


def run(data: Path, out: Path, recipe: Recipe, *, device: str = "auto") -> Evaluation:
    """Fit a head to a folder of pictures, and write a folder that the service loads.

    Unreadable pictures are left out.

    Args:
        data, out, device: see `model.extensions.training.train.run`.
        recipe: names the model, and the checkpoint with its size and precision. Its seed draws the
            folds. Fields about training do not matter.

    Returns:
        The evaluation on held-out pictures.

    Raises:
        DatasetError: the data cannot be read, or a class has less than two readable pictures.
        CheckpointError: the checkpoint cannot be read, or its head cannot be replaced.
        DeviceError: the device is not available here.
        TrainingError: `out` is not empty.
    """
    began = time.monotonic()
    if recipe.checkpoint is None:
        raise TrainingError("recipe: checkpoint: a probe needs one, for its features")
    dataset = open_dataset(data, recipe.validation, recipe.seed)
    prepare_folder(out, data, resume=False)
    start = rounded(read_start(recipe, recipe.checkpoint))
    if isinstance(start.config, LibraryConfig):
        library_head(start.config)  # raises before pictures are decoded
    predictor = Predictor(
        start,
        device=device,
        dtype=recipe.precision,
        compile_mode="off",
        threads=recipe.threads or None,
        streams=1,
    )
    parts = _decoded(dataset, start, out)
    if isinstance(start.config, LibraryConfig):
        _require_linear(predictor, start.tensors, library_head(start.config), parts[0])
    pool = transfer_pool(start.config)
    features = np.concatenate([predict_embeddings(predictor, part.pixels, pool) for part in parts])
    truth = np.concatenate([part.labels for part in parts])
    logger.info(
        "%s: %d classes, %d pictures; %d features of %s after %.0f s",
        data,
        len(dataset.labels),
        len(truth),
        features.shape[1],
        start.name,
        time.monotonic() - began,
    )

    folds = None
    if dataset.own_validation:
        folds = np.repeat(np.array([-1, 0]), [len(part) for part in parts])
    head, choice = _fitted(
        features, truth, dataset.labels, folds, Features.of(start.config), recipe
    )
    logits = choice.logits
    labels = truth[choice.rows]
    fit, _ = choose_fit(logits, labels, Fit(choice.temperature))
    head = replace(head, temperature=fit.temperature, form=fit.form)
    split = "held-out"
    if dataset.test is not None:
        split = "test"
        test = decode(dataset.test, start.preprocess, out, leave_out=True)
        logits = head.logits(predict_embeddings(predictor, test.pixels, pool))
        labels = test.labels
    measured = measure(head.scores(logits), labels, dataset.labels)
    logger.info("%s", _in_words(measured, split))

    served = replace(with_head(start, head), name=recipe.name, source=str(out))
    served.network()  # checks names, shapes and values of the weights
    write_confusion(out, measured, dataset.labels)
    record = {
        "probe_of": start.name,
        "data": dataset.name,
        "images": len(features),
        "shrinkage": choice.shrinkage,
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


def _decoded(dataset: Dataset, start: Checkpoint, out: Path) -> list[Images]:
    """Decode the training and the validation pictures.

    Raises:
        DatasetError: a class has less than two readable pictures.
    """
    parts = [
        decode(files, start.preprocess, out, leave_out=True)
        for files in (dataset.train, dataset.validation)
    ]
    truth = np.concatenate([part.labels for part in parts])
    counts = np.bincount(truth, minlength=len(dataset.labels))
    if counts.min() < 2:
        raise DatasetError(
            f"class {dataset.labels[counts.argmin()]!r}: less than two of its pictures can be read"
        )
    return parts


def _fitted(
    features: NDArray[np.float32],
    truth: NDArray[np.int64],
    labels: tuple[str, ...],
    folds: NDArray[np.int64] | None,
    kind: Features,
    recipe: Recipe,
) -> tuple[Head, Choice]:
    """Fit a head, round it to the dtype on disk, and return it with its cross-validation.

    Args:
        features, truth, labels, folds: see `model.extensions.taught.linear_probe.fit_head`.
        kind: kind of the features, whose parts are weighted.
        recipe: its seed draws the folds.
    """
    fitted, choice = fit_head(
        features, truth, labels, folds, scales=kind.scales(features), seed=recipe.seed
    )
    assert fitted.weight is not None, "it was fitted"
    head = replace(
        fitted,
        weight=_as_stored(fitted.weight),
        bias=_as_stored(np.asarray(fitted.bias)),
        features=kind.pool,
    )
    return head, choice


def _as_stored(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round values to the dtype on disk."""
    rounded_values: NDArray[np.float32] = torch.from_numpy(values).to(STORED_DTYPE).float().numpy()
    return rounded_values


def _write_split(out: Path, dataset: Dataset, start: str) -> None:
    """Record the pictures that the served head is fitted to, and the test pictures.

    That head is fitted to validation pictures, too, after it was measured on them.
    """
    sets = dataset.sets()
    measured = SplitRecord.of(sets, SplitRecord.read(start))
    measured.log_contradictions(sets, dataset.labels)
    served = measured.with_validation_in_training()
    served.log_leaks(start, [TEST])
    if dataset.own_validation:
        measured.log_leaks(start, [VALIDATION])
    write_text(out / SPLIT_FILE, served.text())


def library_head(config: LibraryConfig) -> str:
    """Return the name of the last, linear layer of a library's network.

    Raises:
        CheckpointError: the network does not end in one linear layer.
    """
    head = linear_head(config)
    if head is None:
        raise CheckpointError(
            f"{config.kind}: does not end in one linear layer, which another could take"
        )
    return head


def with_head(checkpoint: Checkpoint, head: Head) -> Checkpoint:
    """Return a checkpoint with another head, which reads the features `transfer_pool`.

    Raises:
        CheckpointError: a library's network does not end in one linear layer.
    """
    old = checkpoint.config
    name = "head"
    config: NetworkConfig
    if isinstance(old, LibraryConfig):
        name = library_head(old)
        sizes = (len(head.labels), old.in_channels, old.image_size)
        config = library_config(old.architecture, old.arguments, *sizes, fixed_size=old.fixed_size)
        tensors = dict(checkpoint.tensors)
    else:
        assert isinstance(old, ViTConfig)
        config = old.model_copy(update={"num_classes": len(head.labels), **_WITHOUT_OLD_HEAD})
        # A projection and an attention pooling go with the old head, because only it reads them.
        names = meta_model(config).state_dict().keys() & checkpoint.tensors.keys()
        tensors = {tensor_name: checkpoint.tensors[tensor_name] for tensor_name in names}
    for kind in ("weight", "bias"):
        tensors[f"{name}.{kind}"] = torch.from_numpy(getattr(head, kind))
    return replace(
        checkpoint,
        format=native.FORMAT,
        config=config,
        labels=head.labels,
        tensors=tensors,
        multi_label=False,
        temperature=head.temperature,
        form=head.form,
        zero_shot=None,
        embed_texts=None,
    )


# Fields of a `ViTConfig` whose new head reads transfer features.
_WITHOUT_OLD_HEAD: Final = {
    "pool": "transfer",
    "pool_prefix": False,
    "pool_heads": None,
    "pool_mlp_width": None,
    "projection_width": None,
    "normalized_head": False,
    "distillation_head": False,
}


def _require_linear(
    predictor: Predictor, tensors: Mapping[str, Tensor], name: str, images: Images
) -> None:
    """Raise CheckpointError unless a layer is the only step from the embedding to the logits.

    Args:
        predictor: a library's network.
        tensors: its weights by name.
        name: name of the layer.
        images: images to compare the logits on.
    """
    weight = tensors[f"{name}.weight"].numpy()
    bias = tensors[f"{name}.bias"].numpy()
    few = images.pixels[:2]
    expected = predict_embeddings(predictor, few) @ weight.T + bias
    pixels = np.ascontiguousarray(few.transpose(0, 2, 3, 1))
    outputs = predictor.predict(pixels, RequestedOutputs(1, logits=True))
    logits = np.array([output.logits for output in outputs])
    if np.linalg.norm(logits - expected) > _ROUNDING * np.linalg.norm(expected):
        raise CheckpointError(
            f"{predictor.checkpoint.source}: {predictor.config.kind} reads more than its embedding"
        )


def _in_words(measured: Evaluation, split: str) -> str:
    """Return the accuracy with its confidence interval."""
    low, high = interval(round(measured.accuracy * measured.count), measured.count)
    sure = f"for pictures like these {low:.1%} to {high:.1%}, with 95% confidence"
    return f"{measured.accuracy:.2%} of {measured.count} {split} pictures right ({sure})"
