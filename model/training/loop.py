"""The training loop: batches in, weights out, resumable at every epoch.

Each epoch draws all its random numbers from (seed, epoch), so that a resumed run continues bit for
bit as the uninterrupted one would have.
"""

from __future__ import annotations

import csv
import math
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from model.config import ViTConfig
from model.device import choose_dtype
from model.errors import TrainingError
from model.training.augment import random_crop, random_flip
from model.training.initialise import start_patches, start_positions
from model.training.recipe import Recipe
from model.training.trivial_augment import trivial_augment
from model.vit import Attention, VisionTransformer

STATE_FILE: Final = "last.pt"
METRICS_FILE: Final = "metrics.csv"
_STATE_VERSION: Final = 1
_WHITENING_IMAGES: Final = 5000
_EVALUATION_BATCH: Final = 500


@dataclass(frozen=True)
class Data:
    """Pictures on the training device.

    Attributes:
        pixels, held_out_pixels: uint8 [N, C, H, W].
        labels, held_out_labels: int64 [N].
        mean, std: per channel, of the training pictures scaled to 0...1.
    """

    pixels: Tensor
    labels: Tensor
    held_out_pixels: Tensor
    held_out_labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 [B, C, H, W] -> float32, as the service will do it."""
        mean = torch.tensor(self.mean, device=pixels.device).reshape(1, -1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).reshape(1, -1, 1, 1)
        return (pixels.float() / 255 - mean) / std


@dataclass(frozen=True)
class EpochMetrics:
    """One row of `metrics.csv`.

    Attributes:
        epoch: counted from 1.
        images: trained on in this epoch.
        learning_rate: the first optimiser's, at the epoch's last step.
        train_loss, train_accuracy: means over the epoch's augmented images as they were seen.
        held_out_loss, held_out_accuracy: without augmentation or smoothing; None where not evaluated.
        images_per_second: training alone.
        seconds: wall time since the run began, evaluation included, interruptions not.
    """

    epoch: int
    images: int
    learning_rate: float
    train_loss: float
    train_accuracy: float
    held_out_loss: float | None
    held_out_accuracy: float | None
    images_per_second: float
    seconds: float


class Trainer:
    """One run of a recipe.

    Args:
        recipe: what to do.
        config: the architecture, fitted to the data.
        data: on `device`.
        folder: where state and metrics go; made if absent.
        device: where to compute.

    Attributes:
        epoch: epochs done.
        history: their metrics.

    Raises:
        TrainingError: fewer training images than one batch.
    """

    def __init__(self, recipe: Recipe, config: ViTConfig, data: Data, folder: Path, device: torch.device) -> None:
        if len(data.labels) < recipe.batch_size:
            raise TrainingError(f"{len(data.labels)} training images do not fill one batch of {recipe.batch_size}")
        self.recipe, self.config, self.data, self.folder, self.device = recipe, config, data, folder, device
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        self.epoch = 0
        self.history: list[EpochMetrics] = []
        self.dtype = choose_dtype(recipe.precision, device)
        if self.dtype == torch.float16:  # would need loss scaling; only devices older than 2020 get here
            self.dtype = torch.float32
        self.model = self._new_model()
        self._names = [name for name, _ in self.model.named_parameters()]
        # Float32 masters take the updates, a copy in the working dtype does the arithmetic: rounded to
        # bfloat16 at each step, late and small updates would be lost.
        self._masters = [p.detach().clone() for p in self.model.parameters()]
        self.model.to(self.dtype)
        self._optimisers = self._new_optimisers()
        self._peaks = [[group["lr"] for group in o.param_groups] for o in self._optimisers]
        self.steps_per_epoch = len(data.labels) // recipe.batch_size
        if recipe.compile and shutil.which("g++") is not None:
            for block in self.model.blocks:
                block.compile(dynamic=False)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The float32 weights by name."""
        return dict(zip(self._names, self._masters, strict=True))

    @property
    def finished(self) -> bool:
        """Whether the schedule is at its end, by epochs or by time."""
        return self.epoch > 0 and self._progress(self.epoch * self.steps_per_epoch, time.monotonic()) >= 1

    @property
    def epochs_trained(self) -> float:
        """How often each training image was seen, on average."""
        return sum(row.images for row in self.history) / len(self.data.labels)

    @property
    def seconds(self) -> float:
        """Wall time of the epochs done."""
        return self.history[-1].seconds if self.history else 0.0

    def run(self, on_epoch: Callable[[EpochMetrics], None] = lambda _: None, *, progress: bool = True) -> None:
        """Train from `epoch` to the recipe's end, writing state and metrics after each epoch.

        Raises:
            TrainingError: the loss is no longer finite.
        """
        while not self.finished:
            metrics = self._run_epoch(progress)
            self.history.append(metrics)
            self.epoch += 1
            self.save()
            on_epoch(metrics)

    @torch.no_grad()
    def held_out_logits(self) -> Tensor:
        """float32 [N, num_classes] on the CPU, for the held-out pictures."""
        self.model.eval()
        with torch.compiler.set_stance("force_eager"):  # another batch size is not worth another compilation
            logits = [
                self.model(self.data.normalise(pixels).to(self.dtype)).logits.float()
                for pixels in torch.split(self.data.held_out_pixels, _EVALUATION_BATCH)
            ]
        self.model.train()
        return torch.cat(logits).cpu()

    def save(self) -> None:
        """Write state and metrics; an interruption leaves the old files or the new ones."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "version": _STATE_VERSION,
            "recipe": self.recipe.model_dump_json(),
            "epoch": self.epoch,
            "history": [vars(row) for row in self.history],
            "weights": self.weights,
            "optimisers": [o.state_dict() for o in self._optimisers],
        }
        part = self.folder / f"{STATE_FILE}.part"
        torch.save(state, part)
        part.replace(self.folder / STATE_FILE)
        part = self.folder / f"{METRICS_FILE}.part"
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(EpochMetrics)])
            writer.writeheader()
            writer.writerows(vars(row) for row in self.history)
        part.replace(self.folder / METRICS_FILE)

    def load(self) -> None:
        """Continue where the folder's state stopped.

        Raises:
            TrainingError: no state there, unreadable, or of another recipe.
        """
        path = self.folder / STATE_FILE
        try:
            state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        except OSError as error:
            raise TrainingError(f"{path}: nothing to resume: {error.strerror}") from error
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise TrainingError(f"{path}: not a training state: {reason}") from error
        if not isinstance(state, dict) or state.get("version") != _STATE_VERSION:
            raise TrainingError(f"{path}: written by another version; start afresh")
        if state["recipe"] != self.recipe.model_dump_json():
            raise TrainingError(f"{path}: made with another recipe; resume with that one or start in another folder")
        with torch.no_grad():
            for name, master in self.weights.items():
                master.copy_(state["weights"][name])
        self._publish()
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.epoch = state["epoch"]
        self.history = [EpochMetrics(**row) for row in state["history"]]

    def _new_model(self) -> VisionTransformer:
        generator = torch.Generator().manual_seed(self.recipe.seed)
        model = VisionTransformer(self.config, drop_path=self.recipe.drop_path)
        model.reset_parameters(generator)
        if self.recipe.initialisation.positions == "sincos":
            start_positions(model)
        if self.recipe.initialisation.whiten_patches:
            start_patches(model, self.data.normalise(self.data.pixels[:_WHITENING_IMAGES]).cpu())
        if self.device.type == "cpu":
            for module in model.modules():
                if isinstance(module, Attention):
                    module.attend = plain_attention
        return model.to(self.device).train()

    def _new_optimisers(self) -> list[torch.optim.Optimizer]:
        settings = self.recipe.optimiser
        muon: list[Tensor] = []
        decayed: list[Tensor] = []
        spared: list[Tensor] = []
        for name, master in self.weights.items():
            if settings.name == "muon" and master.ndim == 2 and name.startswith("blocks."):
                muon.append(master)
            elif master.ndim > 1:
                decayed.append(master)
            else:
                spared.append(master)
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if settings.name == "adamw":
            return [adamw]
        if not hasattr(torch.optim, "Muon"):
            raise TrainingError(f"optimiser muon needs torch 2.9 or later, this is {torch.__version__}")
        matrices = torch.optim.Muon(
            muon,
            lr=settings.muon_learning_rate,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        return [adamw, matrices]

    def _batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """The epoch's augmented batches: normalised [B, C, H, W] in the working dtype, and labels [B]."""
        count, size = len(self.data.labels), self.recipe.batch_size
        order = torch.randperm(count, generator=generator, device=self.device)
        augmentation = self.recipe.augmentation
        for start in range(0, count - size + 1, size):  # the last, smaller batch is left out
            chosen = order[start : start + size]
            pixels = random_crop(self.data.pixels[chosen], augmentation.crop_padding, generator)
            if augmentation.flip:
                pixels = random_flip(pixels, generator)
            pixels = trivial_augment(pixels, augmentation.trivial_augment, generator)
            yield self.data.normalise(pixels).to(self.dtype), self.data.labels[chosen]

    def _run_epoch(self, progress: bool) -> EpochMetrics:
        began = time.monotonic()
        steps_before = self.epoch * self.steps_per_epoch
        seed = self.recipe.seed * 1_000_003 + self.epoch + 1
        generator = torch.Generator(self.device).manual_seed(seed)
        loss_sum = torch.zeros((), device=self.device)
        hits = torch.zeros((), dtype=torch.int64, device=self.device)
        images = 0
        # Stochastic depth and PatchDropout draw from the global generator; it is seeded here and given back after.
        with (
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
            tqdm(
                total=self.steps_per_epoch * self.recipe.batch_size,
                desc=f"epoch {self.epoch + 1}/{self.recipe.epochs}",
                unit="img",
                disable=None if progress else True,  # None: shown on a terminal alone
                mininterval=1.0,
            ) as bar,
        ):
            torch.manual_seed(seed)
            rate = 0.0
            for step, (pixels, labels) in enumerate(self._batches(generator)):
                progress_made = self._progress(steps_before + step, began)
                if progress_made >= 1 and step > 0:  # out of time
                    break
                rate = self._set_rate(min(progress_made, 1.0))
                dropout = self.recipe.patch_dropout
                self.model.patch_dropout = dropout.rate if progress_made < dropout.until else 0.0
                loss, correct = self._step(pixels, labels)
                loss_sum += loss * len(labels)
                hits += correct
                images += len(labels)
                bar.update(len(labels))
        train_loss = loss_sum.item() / images
        if not math.isfinite(train_loss):
            raise TrainingError(f"epoch {self.epoch + 1}: the loss is not finite; lower the learning rate")
        trained = time.monotonic()
        held_out_loss = held_out_accuracy = None
        last = self._progress(steps_before + step + 1, began) >= 1
        if last or (self.epoch + 1) % self.recipe.evaluate_every == 0:
            logits, labels = self.held_out_logits(), self.data.held_out_labels.cpu()
            held_out_loss = F.cross_entropy(logits, labels).item()
            held_out_accuracy = (logits.argmax(dim=1) == labels).sum().item() / len(labels)
        return EpochMetrics(
            epoch=self.epoch + 1,
            images=images,
            learning_rate=rate,
            train_loss=train_loss,
            train_accuracy=hits.item() / images,
            held_out_loss=held_out_loss,
            held_out_accuracy=held_out_accuracy,
            images_per_second=images / (trained - began),
            seconds=self.seconds + time.monotonic() - began,
        )

    def _step(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """One update; returns the mean loss and the number of correct top-1 answers, both on the device."""
        logits = self.model(pixels).logits.float()
        loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        for master, parameter in zip(self._masters, self.model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        for optimiser in self._optimisers:
            optimiser.step()
        self._publish()
        return loss.detach(), (logits.detach().argmax(dim=1) == labels).sum()

    @torch.no_grad()
    def _publish(self) -> None:
        """Masters to the working copy."""
        torch._foreach_copy_(list(self.model.parameters()), self._masters)

    def _progress(self, steps: int, began: float) -> float:
        """Share of the schedule that is behind: of its steps, or of its time where that is further on.

        Args:
            steps: updates done since the run began.
            began: `time.monotonic()` at the start of the epoch under way.
        """
        by_steps = steps / (self.recipe.epochs * self.steps_per_epoch)
        if self.recipe.minutes is None:
            return by_steps
        return max(by_steps, (self.seconds + time.monotonic() - began) / (60 * self.recipe.minutes))

    def _set_rate(self, progress: float) -> float:
        factor = rate_factor(progress, self.recipe.optimiser.warmup)
        for optimiser, peaks in zip(self._optimisers, self._peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        return float(self._optimisers[0].param_groups[0]["lr"])


def rate_factor(progress: float, warmup: float) -> float:
    """Share of the peak learning rate: a linear warm-up from almost zero, then a cosine to zero.

    Args:
        progress: share of the schedule that is done, 0...1.
        warmup: share of the schedule that the rise takes.
    """
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(QK^T / sqrt(d)) V, spelled out.

    On a CPU in bfloat16 and for the short sequences trained here it is four times faster than the
    fused kernel, whose backward pass is slow.

    Args:
        q, k, v: [B, heads, N, head_dim].

    Returns:
        [B, heads, N, head_dim].
    """
    scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return scores.softmax(dim=-1) @ v
