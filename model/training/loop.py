"""The training loop: batches in, weights out, resumable at every epoch.

Each epoch draws all its random numbers from (seed, epoch), so that a resumed run gives the same
bits as an uninterrupted run.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from model.config import ViTConfig
from model.errors import TrainingError
from model.network.layers.attention import Attention, plain_attention
from model.runtime.device import choose_dtype
from model.training.optimisers import MixedPrecisionOptimiser, Position, Schedule
from model.training.recipe import Recipe
from model.training.run_folder import (
    BEST_FILE,
    STATE_FILE,
    EpochMetrics,
    read_state,
    write_metrics,
    write_state,
)
from model.training.start import initial_model
from model.training.teacher import TeacherRecord, TeacherTrainer
from model.training.training_data import TrainingData, augmented_batches

_VALIDATION_BATCH: Final = 500
_VALIDATION_TOKENS: Final = 40_000
"""Bounds a validation batch of large images, and so its memory."""


@dataclass(frozen=True)
class BestWeights:
    """The weights that did best on the validation images, float32 on the CPU, and their epoch, counted from 1."""

    epoch: int
    accuracy: float
    loss: float
    weights: dict[str, Tensor]

    def beats(self, other: BestWeights | None) -> bool:
        """Compare by accuracy and, where that is the same, by loss."""
        return other is None or (self.accuracy, -self.loss) > (other.accuracy, -other.loss)


class _EpochSums(NamedTuple):
    """Sums over an epoch's images, its number of images and steps, and the learning rate of its last step."""

    loss: Tensor
    correct: Tensor
    images: int
    steps: int
    rate: float


class Trainer:
    """One run of a recipe.

    Args:
        config: the architecture, fitted to the data.
        data: at least a batch; validation pictures have the size of the model's input, and training pictures are not
            smaller, unless the recipe resizes crops.
        folder: where state and metrics go; made if absent.
        initial: all weights by the model's parameter names, instead of the recipe's initialisation.
        clock: seconds from any start, never falling.

    Attributes:
        epoch: number of epochs done.
        history: their metrics.
        teacher: what the teacher reached and cost; None without one, and before `run`.

    Raises:
        TrainingError: the architecture does not fit the recipe.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: ViTConfig,
        data: TrainingData,
        folder: Path,
        device: torch.device,
        initial: Mapping[str, Tensor] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if recipe.patch_dropout.rate and (config.relative_position_bias or config.rotary):
            raise TrainingError("patch_dropout: not with relative or rotary positions, which need every patch")
        self.recipe, self.config, self.data, self.folder, self.device = recipe, config, data, folder, device
        self._clock = clock
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        self.epoch = 0
        self.history: list[EpochMetrics] = []
        self.dtype = choose_dtype(recipe.precision, device)
        if self.dtype == torch.float16:  # would need loss scaling; only devices older than 2020 get here
            self.dtype = torch.float32
        self.model = initial_model(recipe, config, data, initial)
        if device.type == "cpu" and self.dtype == torch.bfloat16:
            for module in self.model.modules():
                if isinstance(module, Attention):
                    module.attend = plain_attention
        self.model.to(device).train()
        self._optimiser = MixedPrecisionOptimiser(self.model, self.dtype, recipe)
        self.teacher: TeacherRecord | None = None
        self._teacher: TeacherTrainer | None = None
        if recipe.teacher is not None:
            self._teacher = TeacherTrainer(recipe, data, config.num_classes, folder, device, self.dtype)
            self._inherited_stem(self._teacher)  # another stem is refused before the teacher is trained
        self._best: BestWeights | None = None
        self._best_is_saved = True
        self.steps_per_epoch = len(data.labels) // recipe.batch_size
        self._schedule = Schedule(
            recipe.epochs * self.steps_per_epoch,
            None if recipe.minutes is None else 60 * recipe.minutes,
            recipe.optimiser.restart,
        )
        if recipe.compile and shutil.which("g++") is not None:
            for block in self.model.blocks:
                block.compile(dynamic=False)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return the float32 weights by name, to evaluate and export: their moving average if it is kept."""
        return self._optimiser.weights

    @property
    def best_weights(self) -> dict[str, Tensor]:
        """Return the weights of `best_epoch`, float32 by name; before the first evaluation, the present weights."""
        return self.weights if self._best is None else self._best.weights

    @property
    def best_epoch(self) -> int:
        """Return the epoch, counted from 1, with the best validation accuracy so far, and of equals the lowest loss."""
        return self.epoch if self._best is None else self._best.epoch

    @property
    def finished(self) -> bool:
        """Return whether the schedule is at its end, by epochs or by time."""
        return self.epoch > 0 and self._position(0, 0.0).progress >= 1

    @property
    def epochs_trained(self) -> float:
        """Return how often each training image was seen, on average."""
        return sum(row.images for row in self.history) / len(self.data.labels)

    @property
    def seconds(self) -> float:
        """Return the wall time of the epochs done, in seconds, without the teacher's."""
        return self.history[-1].seconds if self.history else 0.0

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU time of the epochs done, in seconds over all threads, without the teacher's."""
        return self.history[-1].cpu_seconds if self.history else 0.0

    def run(self, on_epoch: Callable[[EpochMetrics], None] = lambda _: None, *, progress: bool = True) -> None:
        """Train from `epoch` to the recipe's end, after the teacher; write state and metrics after each epoch.

        Raises:
            TrainingError: the loss is no longer finite.
        """
        if self.epoch == 0:
            (self.folder / BEST_FILE).unlink(missing_ok=True)  # of a run that did not live to its first state
        if self._teacher is not None:
            self.teacher = self._teacher.run()
            if self.epoch == 0:
                self._optimiser.start_stem(self._inherited_stem(self._teacher))
        while not self.finished:
            metrics = self._run_epoch(progress)
            self.history.append(metrics)
            self.epoch += 1
            self._update_best()
            self.save()
            on_epoch(metrics)

    @torch.no_grad()
    def validation_logits(self) -> Tensor:
        """Return float32 [M, num_classes] on the CPU, for the validation images."""
        self.model.eval()
        batch = max(1, min(_VALIDATION_BATCH, _VALIDATION_TOKENS // self.config.tokens))
        # Another batch size is not worth another compilation.
        with self._optimiser.averaged(), torch.compiler.set_stance("force_eager"):
            logits = [
                self.model(self.data.normalise(pixels.to(self.device)).to(self.dtype)).logits.float()
                for pixels in torch.split(self.data.validation_pixels, batch)
            ]
        self.model.train()
        return torch.cat(logits).cpu()

    def save(self) -> None:
        """Write state, best weights and metrics; an interruption leaves files that can be resumed from."""
        # The best weights come first: cut off after them, the epoch that `last.pt` lacks is done again, and cannot
        # beat itself.
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._best is not None and not self._best_is_saved:
            write_state(self.folder / BEST_FILE, self.recipe, vars(self._best))
            self._best_is_saved = True
        state = {
            "epoch": self.epoch,
            "history": [vars(row) for row in self.history],
            "has_best": self._best is not None,
            **self._optimiser.state_dict(),
        }
        write_state(self.folder / STATE_FILE, self.recipe, state)
        write_metrics(self.folder, self.history)

    def load(self) -> None:
        """Continue where the folder's state stopped; a state without best weights takes its last weights as the best.

        Raises:
            TrainingError: no state there, unreadable, or of another recipe; or its best weights are gone.
        """
        state = read_state(self.folder / STATE_FILE, self.recipe, self.device)
        self._optimiser.load_state_dict(state)
        self.epoch = state["epoch"]
        self.history = [EpochMetrics(**row) for row in state["history"]]
        if state.get("has_best"):
            best = read_state(self.folder / BEST_FILE, self.recipe, torch.device("cpu"))
            self._best = BestWeights(**{field.name: best[field.name] for field in fields(BestWeights)})
            self._best_is_saved = True
        else:
            self._best = None
            self._update_best()

    def _update_best(self) -> None:
        row = self.history[-1]
        if row.validation_accuracy is None or row.validation_loss is None:
            return
        weights = {name: weight.detach().to("cpu", copy=True) for name, weight in self.weights.items()}
        candidate = BestWeights(row.epoch, row.validation_accuracy, row.validation_loss, weights)
        if candidate.beats(self._best):
            self._best, self._best_is_saved = candidate, False

    def _position(self, steps: int, elapsed: float) -> Position:
        """Return where the schedule is after `steps` and `elapsed` seconds of the epoch under way."""
        return self._schedule.at(self.epoch * self.steps_per_epoch + steps, self.seconds + elapsed)

    def _run_epoch(self, show_progress: bool) -> EpochMetrics:
        began, cpu_began = self._clock(), time.process_time()
        with self._seeded_generator() as generator:
            sums = self._train(generator, began, show_progress)
        train_loss = sums.loss.item() / sums.images
        # The last step's outcome is in no loss yet, and must not be saved either.
        if not math.isfinite(train_loss) or not self._optimiser.is_finite():
            raise TrainingError(f"epoch {self.epoch + 1}: the loss is not finite; lower the learning rate")
        trained = ended = self._clock()
        validation_loss = validation_accuracy = None
        last = self._position(sums.steps, trained - began).progress >= 1
        if last or (self.epoch + 1) % self.recipe.evaluate_every == 0:
            validation_loss, validation_accuracy = self._validate()
            ended = self._clock()
        return EpochMetrics(
            epoch=self.epoch + 1,
            images=sums.images,
            learning_rate=sums.rate,
            train_loss=train_loss,
            train_accuracy=sums.correct.item() / sums.images,
            validation_loss=validation_loss,
            validation_accuracy=validation_accuracy,
            images_per_second=sums.images / (trained - began),
            seconds=self.seconds + ended - began,
            cpu_seconds=self.cpu_seconds + time.process_time() - cpu_began,
        )

    @contextmanager
    def _seeded_generator(self) -> Iterator[torch.Generator]:
        """Seed a generator for the epoch, and torch's own, which stochastic depth and PatchDropout draw from."""
        seed = self.recipe.seed * 1_000_003 + self.epoch + 1
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield torch.Generator(self.device).manual_seed(seed)

    def _train(self, generator: torch.Generator, began: float, show_progress: bool) -> _EpochSums:
        """Do the steps of an epoch that began at `began`, as many as the schedule's time allows, but never none."""
        loss_sum = torch.zeros((), device=self.device)
        correct_sum = torch.zeros((), dtype=torch.int64, device=self.device)
        images, done, rate = 0, 0, 0.0
        batches = augmented_batches(self.data, self.recipe, self.config, generator, self._position(0, 0.0).progress)
        with self._progress_bar(show_progress) as bar:
            for done, (pixels, labels, targets) in enumerate(batches):
                progress, restarted = position = self._position(done, self._clock() - began)
                if progress >= 1 and done > 0:  # out of time
                    break
                rate = self._optimiser.set_rate(position)
                dropout = self.recipe.patch_dropout
                self.model.patch_dropout = dropout.rate if progress < dropout.until else 0.0
                distillation = self.recipe.distillation
                if distillation is not None and distillation.frozen_stem:
                    self.model.patch_embed.get_submodule("backbone").requires_grad_(
                        restarted or progress >= distillation.frozen_stem
                    )
                loss, correct = self._step(pixels, labels, targets)
                self._optimiser.update_ema(self.epoch * self.steps_per_epoch + done)
                loss_sum += loss * len(labels)
                correct_sum += correct
                images += len(labels)
                if not bar.disable:
                    bar.set_postfix_str(f"run: {self._time_left(done + 1, began)} left", refresh=False)
                bar.update(len(labels))
        return _EpochSums(loss_sum, correct_sum, images, done + 1, rate)

    def _inherited_stem(self, teacher: TeacherTrainer) -> Mapping[str, Tensor]:
        """Return what the stem starts with by its parameters' names: nothing unless the recipe asks for it."""
        distillation, stem = self.recipe.distillation, self.config.conv_stem
        return teacher.stem_weights(stem) if distillation and distillation.inherit_stem and stem else {}

    def _step(self, pixels: Tensor, labels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Do one update; return the mean loss and the number of correct top-1 answers, both on the device."""
        logits = self.model(pixels.to(self.dtype, memory_format=torch.channels_last)).logits.float()
        loss = F.cross_entropy(logits, targets, label_smoothing=self.recipe.label_smoothing)
        if self._teacher is not None:
            loss = self._distilled(loss, logits, self._teacher.logits(pixels))
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()
        return loss.detach(), (logits.detach().argmax(dim=1) == labels).sum()

    def _distilled(self, loss: Tensor, logits: Tensor, answers: Tensor) -> Tensor:
        """Return the labels' loss mixed with the divergence from the teacher's answers, float32 [B, num_classes]."""
        distillation = self.recipe.distillation
        assert distillation is not None  # a recipe has both or neither
        temperature, weight = distillation.temperature, distillation.weight
        scores, taught = (F.log_softmax(x / temperature, dim=1) for x in (logits, answers))
        divergence = F.kl_div(scores, taught, reduction="batchmean", log_target=True) * temperature**2
        return (1 - weight) * loss + weight * divergence

    def _validate(self) -> tuple[float, float]:
        """Return loss and accuracy on the validation images."""
        logits, labels = self.validation_logits(), self.data.validation_labels.cpu()
        accuracy = (logits.argmax(dim=1) == labels).sum().item() / len(labels)
        return F.cross_entropy(logits, labels).item(), accuracy

    def _progress_bar(self, show: bool) -> tqdm[NoReturn]:
        return tqdm(
            total=self.steps_per_epoch * self.recipe.batch_size,
            desc=f"epoch {self.epoch + 1}/{self.recipe.epochs}",
            unit="img",
            disable=None if show else True,  # None: shown on a terminal alone
            mininterval=1.0,
        )

    def _time_left(self, steps: int, began: float) -> str:
        """Return the training time left of the run, at the pace of the epoch under way, which has done `steps`."""
        elapsed = self._clock() - began
        done = self.epoch * self.steps_per_epoch + steps
        return tqdm.format_interval(self._schedule.seconds_left(done, self.seconds + elapsed, elapsed / steps))
