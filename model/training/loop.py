"""The training loop: batches in, weights out.

Each epoch draws all its random numbers from (seed, epoch): the same recipe gives the same bits on the same device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model.config import ViTConfig
from model.errors import TrainingError
from model.network.layers.attention import Attention, plain_attention
from model.network.vit import VisionTransformer
from model.training.recipe import Recipe
from model.training.training_data import Arithmetic, TrainingData

# What an epoch measured, by name:
#
#   epoch: counted from 1.
#   train_loss, train_accuracy: means over the epoch's augmented images as they were seen.
#   validation_loss, validation_accuracy: without augmentation or smoothing.
#   images_per_second: of training alone.
#   seconds: wall time since the run began, evaluation included.
EpochMetrics = dict[str, float]


@dataclass(frozen=True)
class BestWeights:
    """The weights that did best on the validation images, float32 on the CPU, and their epoch, counted from 1."""

    epoch: int
    weights: dict[str, Tensor]


class Trainer:
    """One run of a recipe.

    Args:
        config: the architecture.
        initial: all weights by the model's parameter names.
        data: at least a batch of training images.

    Attributes:
        history: the metrics of the epochs that are done.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: ViTConfig,
        initial: Mapping[str, Tensor],
        data: TrainingData,
        device: torch.device,
    ) -> None:
        self.recipe, self.data, self.device = recipe, data, device
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        self.history: list[EpochMetrics] = []
        self.arithmetic = Arithmetic(recipe.precision, device)
        self.model = VisionTransformer(config)
        self.model.load_state_dict(initial)
        if device.type == "cpu" and self.arithmetic.dtype == torch.bfloat16:
            for module in self.model.modules():
                if isinstance(module, Attention):
                    module.attend = plain_attention
        self.model.to(device).train()
        self._optimiser = optimiser_of(self.model, recipe)
        self._steps = len(data.train) // recipe.batch_size  # of an epoch

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return the float32 weights by name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def run(self, on_epoch: Callable[[EpochMetrics], None] = lambda _: None) -> BestWeights:
        """Train, and return the weights with the best validation accuracy, and of equals with the lowest loss.

        Raises:
            TrainingError: the loss is no longer finite.
        """
        began, best = time.monotonic(), BestWeights(0, {})
        for epoch in range(self.recipe.epochs):
            metrics = self._run_epoch(epoch, began)
            self.history.append(metrics)
            # Of equals the first.
            first = max(self.history, key=lambda row: (row["validation_accuracy"], -row["validation_loss"]))
            if first is metrics:
                weights = {name: weight.to("cpu", copy=True) for name, weight in self.weights.items()}
                best = BestWeights(epoch + 1, weights)
            on_epoch(metrics)
        return best

    @torch.no_grad()
    def _validation_logits(self) -> Tensor:
        """Return float32 [M, num_classes] on the CPU, for the validation images."""
        self.model.eval()
        with self.arithmetic.autocast:
            logits = [
                self.model(self.data.normalise(pixels.to(self.device))).logits.float().cpu()
                for pixels in self.data.validation_batches()
            ]
        self.model.train()
        return torch.cat(logits)

    def _run_epoch(self, epoch: int, began: float) -> EpochMetrics:
        started = time.monotonic()
        loss_sum, correct = self._train(epoch)
        trained, images = time.monotonic(), self._steps * self.recipe.batch_size
        logits, labels = self._validation_logits(), torch.from_numpy(self.data.validation.labels)
        metrics = EpochMetrics(
            epoch=epoch + 1,
            train_loss=loss_sum / images,
            train_accuracy=correct / images,
            validation_loss=F.cross_entropy(logits, labels).item(),
            validation_accuracy=(logits.argmax(dim=1) == labels).sum().item() / len(labels),
            images_per_second=images / (trained - started),
            seconds=time.monotonic() - began,
        )
        # The outcome of the last step is in no training loss yet.
        if not (math.isfinite(metrics["train_loss"]) and math.isfinite(metrics["validation_loss"])):
            raise TrainingError(f"epoch {epoch + 1}: the loss is not finite; lower the learning rate")
        return metrics

    def _train(self, epoch: int) -> tuple[float, float]:
        """Do the steps of an epoch; return summed losses and the number of right answers."""
        recipe, sums = self.recipe, torch.zeros(2, device=self.device)
        batches = self.data.epoch(recipe, np.random.default_rng((recipe.seed, epoch)))
        bar = tqdm(batches, total=self._steps, desc=f"epoch {epoch + 1}/{recipe.epochs}", disable=None)
        for step, (images, classes) in enumerate(bar, start=epoch * self._steps):
            for group in self._optimiser.param_groups:
                group["lr"] = group["peak"] * rate_factor(step / (recipe.epochs * self._steps), recipe.warmup)
            sums += self._step(self.data.normalise(images.to(self.device)), classes.to(self.device))
        loss_sum, correct = sums.tolist()
        return loss_sum, correct

    def _step(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Do one update; return the sum of the losses and the number of right answers, float32 [2] on the device."""
        with self.arithmetic.autocast:
            logits = self.model(pixels.contiguous(memory_format=torch.channels_last)).logits.float()
        loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.recipe.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self._optimiser.step()
        self._optimiser.zero_grad()
        return torch.stack((loss.detach() * len(labels), (logits.argmax(dim=1) == labels).sum()))


def optimiser_of(model: VisionTransformer, recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW on the weights of a model; each group has its peak rate as `peak`."""
    depth = model.config.depth
    groups = [
        {
            "params": [parameter],
            "peak": recipe.learning_rate * recipe.layer_decay ** (depth + 1 - layer_of(name, depth)),
            "weight_decay": recipe.weight_decay if parameter.ndim > 1 else 0.0,
        }
        for name, parameter in model.named_parameters()
    ]
    return torch.optim.AdamW(groups)


def rate_factor(progress: float, warmup: float) -> float:
    """Return the share of the peak learning rate: a linear warm-up from almost zero, then a cosine to zero.

    Both arguments are shares of the schedule, 0...1: the part that is done, and the part that the warm-up takes.
    """
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def layer_of(name: str, depth: int) -> int:
    """Return a parameter's layer: 0 for the embeddings, i + 1 for block i, `depth` + 1 for all that follows the blocks.

    BEiT's numbering (Bao et al. 2021, https://arxiv.org/abs/2106.08254), also timm's.
    """
    part, _, rest = name.partition(".")
    if part == "blocks":
        return int(rest.partition(".")[0]) + 1
    embeddings = ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre")
    return 0 if part in embeddings else depth + 1
