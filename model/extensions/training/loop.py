"""The training loop, which resumes at every epoch.

Each epoch draws its random numbers from the seed and its own number, so a resumed run gives the
same bits as an uninterrupted one.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from model.config import ViTConfig
from model.errors import TrainingError
from model.extensions.training.optimisers import ModelOptimiser, Position, position
from model.extensions.training.patch_dropout import PatchDropper
from model.extensions.training.recipe import Recipe
from model.extensions.training.run_folder import (
    EpochMetrics,
    read_state,
    write_metrics,
    write_state,
)
from model.extensions.training.teacher import TeacherNet, answers, stem_weights, train_teacher
from model.extensions.training.training_data import Arithmetic, TrainingData, mix
from model.network.layers.attention import Attention, plain_attention
from model.network.layers.position import sincos2d_position_embedding
from model.network.vit import VisionTransformer

# The papers use 10,000, but grids are small here: the lowest frequency is just above
# 1 / _TEMPERATURE.
_TEMPERATURE: Final = 100.0
_POSITION_SCALE: Final = 0.3


@dataclass(frozen=True)
class BestWeights:
    """The weights after the epoch with the best validation accuracy.

    Attributes:
        epoch: the epoch, counted from 1.
        weights: float32 on the CPU, by parameter name.
    """

    epoch: int
    weights: dict[str, Tensor]


class Trainer:
    """One run of a recipe.

    Args:
        recipe: the choices of the run.
        config: the architecture, fitted to the data.
        data: at least one batch of training images.
        folder: folder for state and metrics, created if absent.
        device: device of the computation.
        initial: weights by parameter name; None: see `initial_model`.

    Attributes:
        epoch: number of finished epochs.
        history: metrics of each finished epoch.
        best: the best weights so far; equal accuracies compare by validation loss.
        teacher: accuracy and cost of the teacher, once it is trained.

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
    ) -> None:
        if recipe.patch_dropout.rate and (config.relative_position_bias or config.rotary):
            raise TrainingError(
                "patch_dropout: not with relative or rotary positions, which need every patch"
            )
        self.recipe = recipe
        self.config = config
        self.data = data
        self.folder = folder
        self.device = device
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        self.epoch = 0
        self.history: list[EpochMetrics] = []
        self.best: BestWeights | None = None
        self.arithmetic = Arithmetic(recipe.precision, device)
        self.model = initial_model(config, recipe.seed, initial)
        if device.type == "cpu" and self.arithmetic.dtype == torch.bfloat16:
            for module in self.model.modules():
                if isinstance(module, Attention):
                    module.attend = plain_attention
        self.model.to(device).train()
        self.patch_dropper = PatchDropper(self.model)
        self._optimiser = ModelOptimiser(self.model, recipe.optimiser)
        self.teacher: dict[str, float] | None = None
        self._teacher: TeacherNet | None = None
        if recipe.teacher is not None:
            self._teacher = TeacherNet(recipe.teacher.widths, config.num_classes)
            self._inherit_stem(self._teacher)  # refuses a stem that does not fit before training
        self._steps_per_epoch = len(data.train) // recipe.batch_size

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return the float32 weights by name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @property
    def seconds(self) -> float:
        """Return the wall time of the finished epochs in seconds, without the teacher's."""
        return self.history[-1]["seconds"] if self.history else 0.0

    def run(self, on_epoch: Callable[[EpochMetrics], None] = lambda _: None) -> BestWeights:
        """Train the teacher if there is one, and then the remaining epochs.

        Args:
            on_epoch: called after each epoch, whose state and metrics are then on the disk.

        Raises:
            TrainingError: the loss has become infinite or NaN.
        """
        if self._teacher is not None:
            if self.teacher is None:
                self.teacher = train_teacher(self._teacher, self.recipe, self.data, self.arithmetic)
                self._inherit_stem(self._teacher)
                self.save()
            self._teacher.to(self.device).eval().requires_grad_(False)
        while self.epoch < self.recipe.epochs:
            metrics = self._run_epoch()
            self.history.append(metrics)
            self.epoch += 1
            # `max` returns the first of equal epochs.
            best = max(
                self.history, key=lambda row: (row["validation_accuracy"], -row["validation_loss"])
            )
            if best["epoch"] == self.epoch:
                weights = {
                    name: weight.to("cpu", copy=True) for name, weight in self.weights.items()
                }
                self.best = BestWeights(self.epoch, weights)
            self.save()
            on_epoch(metrics)
        assert self.best is not None  # a recipe has an epoch
        return self.best

    @torch.no_grad()
    def validation_logits(self) -> Tensor:
        """Return the logits of the validation images, float32 [M, num_classes] on the CPU."""
        self.model.eval()
        with self.arithmetic.autocast:
            logits = [
                self.model(self.data.normalise(pixels.to(self.device))).logits.float().cpu()
                for pixels in self.data.validation_batches()
            ]
        self.model.train()
        return torch.cat(logits)

    def save(self) -> None:
        """Write state and metrics; an interruption leaves the files of the previous call."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "epoch": self.epoch,
            "history": self.history,
            "best": None if self.best is None else vars(self.best),
            "weights": self.weights,
            "optimisers": [optimiser.state_dict() for optimiser in self._optimiser.all],
            "teacher": None
            if self._teacher is None
            else (self.teacher, self._teacher.state_dict()),
        }
        write_state(self.folder, self.recipe, state)
        write_metrics(self.folder, self.history)

    def load(self) -> None:
        """Continue from the state in the folder.

        Raises:
            TrainingError: the state is missing, unreadable, or of another recipe.
        """
        state = read_state(self.folder, self.recipe, self.device)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        for optimiser, saved in zip(self._optimiser.all, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.epoch = state["epoch"]
        self.history = state["history"]
        self.best = None if state["best"] is None else BestWeights(**state["best"])
        if self._teacher is not None:
            self.teacher, weights = state["teacher"]
            self._teacher.load_state_dict(weights)

    def _run_epoch(self) -> EpochMetrics:
        began = time.monotonic()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            # Patch dropout draws from this generator.
            torch.manual_seed(self.recipe.seed * 1_000_003 + self.epoch)
            loss_sum, correct, rate = self._train()
        trained = time.monotonic()
        images = self._steps_per_epoch * self.recipe.batch_size
        logits = self.validation_logits()
        labels = torch.from_numpy(self.data.validation.labels)
        metrics = EpochMetrics(
            epoch=self.epoch + 1,
            learning_rate=rate,
            train_loss=loss_sum / images,
            train_accuracy=correct / images,
            validation_loss=F.cross_entropy(logits, labels).item(),
            validation_accuracy=(logits.argmax(dim=1) == labels).sum().item() / len(labels),
            images_per_second=images / (trained - began),
            seconds=self.seconds + time.monotonic() - began,
        )
        # Only the validation loss shows whether the last step diverged.
        if not (math.isfinite(metrics["train_loss"]) and math.isfinite(metrics["validation_loss"])):
            raise TrainingError(
                f"epoch {self.epoch + 1}: the loss is not finite; lower the learning rate"
            )
        return metrics

    def _train(self) -> tuple[float, float, float]:
        """Train one epoch.

        Returns:
            The sum of the losses, the number of right answers, and the last learning rate.
        """
        sums = torch.zeros(2, device=self.device)
        rate = 0.0
        generators = [
            np.random.default_rng((self.recipe.seed, self.epoch, stream)) for stream in range(2)
        ]
        batches = self.data.epoch(self.recipe.batch_size, self.recipe.augmentation, generators[0])
        begin = self._position(0)
        bar = tqdm(
            total=self._steps_per_epoch,
            desc=f"epoch {self.epoch + 1}/{self.recipe.epochs}",
            disable=None,
        )
        with bar:
            for step, (_, images, classes) in enumerate(batches):
                where = self._position(step)
                rate = self._optimiser.set_rate(where)
                self._follow(where)
                pixels = self.data.normalise(images.to(self.device))
                labels = classes.to(self.device)
                targets = F.one_hot(labels, self.config.num_classes).float()
                if begin.progress < self.recipe.mixing.until:
                    pixels, targets = mix(pixels, targets, self.recipe.mixing, generators[1])
                sums += self._step(pixels, labels, targets)
                bar.update()
        loss_sum, correct = sums.tolist()
        return loss_sum, correct, rate

    def _position(self, step: int) -> Position:
        """Return the position of a step of this epoch in the schedule."""
        steps = self._steps_per_epoch
        return position(
            self.epoch * steps + step, self.recipe.epochs * steps, self.recipe.optimiser.restart
        )

    def _follow(self, where: Position) -> None:
        """Set patch dropout, and freeze or thaw the stem, for this position."""
        dropout = self.recipe.patch_dropout
        teacher = self.recipe.teacher
        self.patch_dropper.rate = dropout.rate if where.progress < dropout.until else 0.0
        if teacher is not None and teacher.frozen_stem:
            learns = where.restarted or where.progress >= teacher.frozen_stem
            self.model.patch_embed.get_submodule("backbone").requires_grad_(learns)

    def _inherit_stem(self, teacher: TeacherNet) -> None:
        stem = self.config.conv_stem
        assert stem is not None  # a recipe with a teacher has one
        self.model.patch_embed.get_submodule("backbone").load_state_dict(
            stem_weights(teacher, stem)
        )

    def _step(self, pixels: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        """Update the weights once.

        Returns:
            The sum of the losses and the number of right answers, float32 [2] on the device.
        """
        with self.arithmetic.autocast:
            logits = self.model(pixels.contiguous(memory_format=torch.channels_last)).logits.float()
        loss = F.cross_entropy(logits, targets, label_smoothing=self.recipe.label_smoothing)
        if self._teacher is not None and self.recipe.teacher is not None:
            weight = self.recipe.teacher.weight
            temperature = self.recipe.teacher.temperature
            divergence = distillation_loss(
                logits, answers(self._teacher, pixels, self.arithmetic), temperature
            )
            loss = (1 - weight) * loss + weight * divergence
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()
        return torch.stack((loss.detach() * len(labels), (logits.argmax(dim=1) == labels).sum()))


def distillation_loss(logits: Tensor, answers: Tensor, temperature: float) -> Tensor:
    """Return the mean divergence of a model's scores from its teacher's.

    Knowledge distillation (Hinton et al. 2015, https://arxiv.org/abs/1503.02531).

    Args:
        logits, answers: logits of model and teacher, [B, num_classes].
        temperature: divisor of both logits.
    """
    scores = F.log_softmax(logits / temperature, dim=1)
    taught = F.log_softmax(answers / temperature, dim=1)
    return F.kl_div(scores, taught, reduction="batchmean", log_target=True) * temperature**2


def initial_model(
    config: ViTConfig, seed: int, initial: Mapping[str, Tensor] | None
) -> VisionTransformer:
    """Return the float32 model that training starts with, on the CPU.

    Args:
        config: the architecture.
        seed: seed of the random weights.
        initial: weights by parameter name; None draws them, and positions get a sine-cosine code.
    """
    model = VisionTransformer(config)
    if initial is not None:
        model.load_state_dict(initial)
        return model
    model.reset_parameters(torch.Generator().manual_seed(seed))
    assert model.pos_embed is not None  # recipes train models with learned positions
    # Frequencies of MoCo v3 (Chen et al. 2021, https://arxiv.org/abs/2104.02057): the lowest of q
    # frequencies is `_TEMPERATURE` to the power -(q - 1) / q. The code of the row comes first.
    quarter = config.width // 4
    code = sincos2d_position_embedding(
        config.grid, config.width, temperature=_TEMPERATURE ** ((quarter - 1) / quarter)
    )
    with torch.no_grad():
        model.pos_embed[0, config.prefix_tokens :] = _POSITION_SCALE * code[0].roll(
            2 * quarter, dims=1
        )
    return model
