"""A linear probe: a new head on the features of a checkpoint that stays as it is.

    data -> features, once -> penalty, by cross-validation -> head, fitted to all pictures -> config, weights, figures

Features are what the head reads, so the new head takes the old one's place. It is a softmax regression with a penalty
on its squared weights.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from model.checkpoint import Checkpoint, native
from model.config import LibraryConfig, NetworkConfig, ViTConfig
from model.data.datasets import count_by_class, open_dataset
from model.data.labelled_images import MEMORY, Images, PixelStorage
from model.errors import CheckpointError, TrainingError
from model.evaluation.evaluate import Evaluation, measure, predict_embeddings
from model.network.library import library_config, linear_head
from model.runtime.device import choose_device
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import one_thread
from model.training import run_folder
from model.training.recipe import Recipe
from model.training.report.figures import FOLDER, write_figures
from model.training.run_record import describe_device, installed_versions
from model.training.start import read_start
from model.training.train import STORED_DTYPE, calibrating_temperature, rounded

logger = logging.getLogger(__name__)

PENALTIES: Final = tuple(10 ** (0.5 - number / 2) for number in range(11))
"""What half the squared weights are multiplied by, for features of unit variance; the strongest first."""
_PATIENCE: Final = 2
"""Penalties that are tried after the best one."""
_GRADIENT: Final = 1e-6
"""Largest entry of the gradient where a fit ends."""
_FOLDS: Final = 5
_ENOUGH: Final = 10_000
"""Pictures that are held out, at most: of more than this a single fold is."""
_MANY: Final = 1_000_000
"""Logits of all pictures from which on several threads fit a head. In smaller fits they wait longer than they work."""
_ROUNDING: Final = 0.1
"""How far logits may lie from those of the embedding, relative to their norm: in bfloat16 some percent."""
_CONFUSIONS: Final = 3
"""Pairs of classes that are named in the log."""


class Head(NamedTuple):
    """A linear head of K classes: weight [K, D] and bias [K], float64."""

    weight: Tensor
    bias: Tensor

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits, float64 [N, K], of features, float64 [N, D]."""
        return features @ self.weight.T + self.bias


class Choice(NamedTuple):
    """The result of a cross-validation.

    Attributes:
        penalty: the one with the lowest loss.
        temperature: of the held-out pictures' scores at this penalty; see `calibrating_temperature`.
        loss: their mean negative log-likelihood at this temperature, in nats.
        rows: int64 [M], the held-out pictures.
        logits: float64 [M, K], theirs at this penalty.
    """

    penalty: float
    temperature: float
    loss: float
    rows: Tensor
    logits: Tensor


def run(
    data: Path, out: Path, recipe: Recipe, *, device: str = "auto", memory: int = MEMORY, progress: bool = True
) -> Evaluation:
    """Fit a head to a folder of pictures, leave a servable folder, and return what was measured on held-out pictures.

    Args:
        data, out, device, memory: see `model.training.train.run`.
        recipe: names the model, the checkpoint with its size and preprocessing, and the precision of its features; the
            seed decides the folds. Fields on training are not used.

    Raises:
        DatasetError: the data cannot be read, or a class has less than two pictures.
        CheckpointError: the checkpoint cannot be read, or its head cannot be replaced.
        DeviceError: the device is not available here.
        TrainingError: `out` holds something already, or another run is under way there.
    """
    begin = time.monotonic()
    if recipe.checkpoint is None:
        raise TrainingError("recipe: checkpoint: a probe needs one, for its features")
    torch_device = choose_device(device)
    dataset = open_dataset(data, recipe.validation, recipe.seed, skip_bad=True)
    storage = PixelStorage(out, memory)
    run_folder.prepare_folder(out, dataset, data, resume=False)
    with run_folder.folder_lock(out):
        start = rounded(read_start(recipe, recipe.checkpoint))
        heads = head_names(start.config)
        dtype, threads = recipe.precision, recipe.threads or None
        predictor = Predictor(start, device=device, dtype=dtype, compile_mode="off", threads=threads, streams=1)

        def features_of(images: Images) -> Tensor:
            return torch.from_numpy(predict_embeddings(predictor, images.pixels, progress=progress)).double()

        parts = dataset.load(start.preprocess, start.preprocess, storage, progress=progress)
        truth = torch.from_numpy(np.concatenate([part.labels for part in parts]))
        count_by_class(truth.numpy(), dataset.labels)  # again, as bad files were left out
        if isinstance(start.config, LibraryConfig):
            _require_linear(predictor, start.tensors, heads[0], parts[0])
        features = torch.cat([features_of(part) for part in parts if len(part)])
        sizes = len(dataset.labels), len(truth), features.shape[1], start.name, time.monotonic() - begin
        logger.info("%s: %d classes, %d pictures; %d features of %s after %.0f s", data, *sizes)

        folds = _folds(truth.numpy(), recipe.seed)
        if dataset.has_validation and all(map(len, parts)):
            folds = np.repeat(np.array([-1, 0]), [len(part) for part in parts])
        choice = choose_penalty(features, truth, folds, len(dataset.labels))
        paths = head_path(features, truth, len(dataset.labels))
        fitted = next(islice(paths, PENALTIES.index(choice.penalty), None))
        head = Head(*(tensor.to(STORED_DTYPE).double() for tensor in fitted))
        split, logits, labels = "held-out", choice.logits, truth[choice.rows]
        if dataset.has_test and len(test := dataset.load_test(start.preprocess, storage, progress=progress)):
            split, logits, labels = "test", head.logits(features_of(test)), torch.from_numpy(test.labels)
        scores = (logits / choice.temperature).softmax(dim=1).float().numpy()
        measured = measure(scores, labels.numpy(), dataset.labels)
        for line in _in_words(measured, split, dataset.labels):
            logger.info("%s", line)

        served = with_head(start, heads, head, dataset.labels)
        served = replace(served, name=recipe.name, source=str(out), temperature=choice.temperature)
        served.network()  # names, shapes and values of the weights are checked here
        write_figures(out, measured, dataset.labels, ())
        record = {
            "probe_of": start.name,
            "data": dataset.name,
            "images": len(truth),
            "penalty": choice.penalty,
            "seed": recipe.seed,
            split: measured.record(),
            "seconds": time.monotonic() - begin,
            "device": describe_device(torch_device),
            "versions": installed_versions(),
        }
        native.write(out, served, dtype=STORED_DTYPE, training=record)
    logger.info("%s: done after %.0f s; the confusion matrix is in %s", data, time.monotonic() - begin, out / FOLDER)
    return measured


def choose_penalty(features: Tensor, labels: Tensor, folds: NDArray[np.int64], classes: int) -> Choice:
    """Return the penalty whose heads give held-out pictures the best scores.

    A strong penalty often gives the better answers, at scores that are too low. The temperature mends these, so the
    losses are compared with it.

    Args:
        features: float64 [N, D].
        labels: int64 [N].
        folds: int64 [N], the fold in which each picture is held out; -1 is none.
    """
    numbers = range(folds.max() + 1)
    held_out = [torch.from_numpy(np.flatnonzero(folds == number)) for number in numbers]
    rest = [torch.from_numpy(np.flatnonzero(folds != number)) for number in numbers]
    paths = [head_path(features[rows], labels[rows], classes) for rows in rest]
    rows = torch.cat(held_out)
    best: Choice | None = None
    for penalty, heads in zip(PENALTIES, zip(*paths, strict=True), strict=True):
        logits = torch.cat([head.logits(features[part]) for head, part in zip(heads, held_out, strict=True)])
        temperature = calibrating_temperature(logits, labels[rows])
        loss = float(F.cross_entropy(logits / temperature, labels[rows]))
        if best is None or loss < best.loss:
            best = Choice(penalty, temperature, loss, rows, logits)
        elif PENALTIES.index(penalty) - PENALTIES.index(best.penalty) == _PATIENCE:
            break
    assert best is not None
    return best


def head_path(features: Tensor, labels: Tensor, classes: int) -> Iterator[Head]:
    """Yield the head of each penalty, the strongest first, each found from the one before it.

    A head is the minimum of the mean negative log-likelihood plus the penalty times half the sum of squared weights,
    for features that are centred and divided by the root of their mean variance. The bias has no penalty.

    Args:
        features: float64 [N, D].
        labels: int64 [N].
    """
    mean = features.mean(dim=0)
    scale = (features - mean).square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (features - mean) / scale
    weight = torch.zeros(classes, features.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    for penalty in PENALTIES:
        optimiser = torch.optim.LBFGS(
            [weight, bias],
            max_iter=1000,
            tolerance_grad=_GRADIENT,
            tolerance_change=0,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def loss(optimiser: torch.optim.LBFGS = optimiser, penalty: float = penalty) -> Tensor:
            optimiser.zero_grad()
            value = F.cross_entropy(F.linear(scaled, weight, bias), labels) + penalty / 2 * weight.square().sum()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        with one_thread(features.device) if len(features) * classes < _MANY else nullcontext():
            optimiser.step(loss)  # type: ignore[no-untyped-call]
        unscaled = weight.detach() / scale
        yield Head(unscaled, bias.detach() - unscaled @ mean)


def head_names(config: NetworkConfig) -> tuple[str, ...]:
    """Return the names of the layers that a head is written to; a distilled model's two get the same one.

    The mean of their logits is then the head's logits of the mean of their tokens, which is the embedding.

    Raises:
        CheckpointError: a library's network does not end in one linear layer.
    """
    if isinstance(config, LibraryConfig):
        return (linear_head(config),)
    return ("head", "head_dist") if isinstance(config, ViTConfig) and config.distillation_head else ("head",)


def with_head(checkpoint: Checkpoint, names: Sequence[str], head: Head, labels: tuple[str, ...]) -> Checkpoint:
    """Return a checkpoint with another head, and labels; a head of two layers, or of cosines, becomes a linear one."""
    old = checkpoint.config
    tensors = dict(checkpoint.tensors)
    config: NetworkConfig
    if isinstance(old, LibraryConfig):
        sizes = len(labels), old.in_channels, old.image_size
        config = library_config(old.architecture, old.arguments, *sizes, fixed_size=old.fixed_size)
    else:
        config = old.model_copy(update={"num_classes": len(labels), "head_width": None, "normalized_head": False})
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("pre_logits.")}
    for name in names:
        tensors |= {f"{name}.weight": head.weight.float(), f"{name}.bias": head.bias.float()}
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


def _require_linear(predictor: Predictor, tensors: Mapping[str, Tensor], name: str, images: Images) -> None:
    """Raise CheckpointError unless this layer of a library's network maps the embedding to the logits."""
    weight, bias = (tensors[f"{name}.{kind}"].double() for kind in ("weight", "bias"))
    few = images.pixels[:2]
    expected = Head(weight, bias).logits(torch.from_numpy(predict_embeddings(predictor, few)).double())
    logits = torch.from_numpy(predictor.logits(np.ascontiguousarray(few.transpose(0, 2, 3, 1))))
    if (logits - expected).norm() > _ROUNDING * expected.norm():
        raise CheckpointError(f"{predictor.checkpoint.source}: {predictor.config.kind} reads more than its embedding")


def _folds(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the fold in which each picture is held out, int64 [N]; each class is spread over all of them."""
    order = np.random.default_rng(seed).permutation(len(labels))
    folds = np.empty(len(labels), np.int64)
    folds[order[np.argsort(labels[order], kind="stable")]] = np.arange(len(labels)) % _FOLDS
    folds[folds >= math.ceil(_ENOUGH / len(labels))] = -1
    return folds


def _in_words(measured: Evaluation, split: str, labels: tuple[str, ...]) -> Iterator[str]:
    """Yield what was measured: accuracy with its interval of confidence (Wilson 1927), and what is confused most."""
    count, share, z = measured.count, measured.accuracy, 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    interval = f"{middle - half:.1%} to {middle + half:.1%}"
    yield f"{share:.2%} of {count} {split} pictures right (for pictures like these {interval}, with 95% confidence)"
    errors = np.array(measured.confusion)
    np.fill_diagonal(errors, 0)
    worst = np.dstack(np.unravel_index(np.argsort(-errors, axis=None, kind="stable")[:_CONFUSIONS], errors.shape))[0]
    named = [f"{labels[i]} as {labels[j]} ({errors[i, j]})" for i, j in worst if errors[i, j]]
    if named:
        yield f"confused most: {', '.join(named)}"
