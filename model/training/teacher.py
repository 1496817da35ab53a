"""The teacher: a small convolutional network that a recipe trains before the model, which then learns its answers.

Convolutions learn from few pictures in few epochs, which a Vision Transformer does not; its answers on the augmented
pictures hand that on (Touvron et al. 2020, https://arxiv.org/abs/2012.12877, section 5.4). The network and its training
follow Jordan 2024, https://arxiv.org/abs/2404.00498, and its variant with Muon
(https://github.com/KellerJordan/cifar10-airbench): whitening filters as a fixed first layer, convolutions that start at
the identity and keep their norm, batch norms without scale, and mirroring that alternates from epoch to epoch.
The teacher is a part of the recipe: its weights are not served.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ConvolutionalStem
from model.errors import TrainingError
from model.network.vit import count_parameters
from model.training.augment.augment import random_crop, random_resample
from model.training.recipe import Recipe, Teacher, TeacherRun
from model.training.run_folder import TEACHER_FILE, read_state, write_state
from model.training.start import whitening_filters, whitening_sample
from model.training.training_data import TrainingData

logger = logging.getLogger(__name__)

_WHITENING_EDGE: Final = 2
_LEARN_WHITENING_BIAS: Final = 0.2
"""Share of the schedule over which the first layer's biases are learned; from then on nothing reaches back to it."""
_HEAD_RATE: Final = 0.67
_BIAS_RATE: Final = 0.053
_DECAY: Final = 4e-3
_SMOOTHING: Final = 0.1
_VALIDATION_BATCH: Final = 500


@dataclass(frozen=True)
class TeacherRecord:
    """What the teacher reached and cost.

    Attributes:
        validation_accuracy: share of the validation images that it answers right, 0...1.
        seconds, cpu_seconds: wall time and CPU time of its training; interruptions do not count.
        parameters: number of its parameters.
    """

    validation_accuracy: float
    seconds: float
    cpu_seconds: float
    parameters: int


class TeacherNet(nn.Module):
    """Whitening filters, three groups of two convolutions that halve the resolution, the maximum over what is left.

    Args:
        widths: channels of the groups.
        num_classes: length of the answers.
    """

    def __init__(self, widths: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        whitened = 2 * 3 * _WHITENING_EDGE**2
        self.whitening = nn.Conv2d(3, whitened, _WHITENING_EDGE)
        self.whitening.weight.requires_grad_(False)
        inputs = (whitened, *widths)
        self.groups = nn.Sequential(*(_Group(i, o) for i, o in zip(inputs, widths, strict=False)))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    @torch.no_grad()
    def reset_parameters(self, pixels: Tensor, generator: torch.Generator) -> None:
        """Initialise with the whitening filters of these training pictures, float32 [N, 3, H, W], normalised."""
        filters = whitening_filters(_even(pixels), _WHITENING_EDGE)
        self.whitening.weight.copy_(torch.cat([filters, -filters]))
        nn.init.zeros_(self.whitening.bias)  # type: ignore[arg-type]
        for module in self.modules():
            if isinstance(module, _Convolution):
                module.reset_parameters(generator)
        nn.init.uniform_(self.head.weight, -math.sqrt(3), math.sqrt(3), generator=generator)  # of deviation 1

    def forward(self, pixels: Tensor, learn_whitening_bias: bool = False) -> Tensor:
        """Map normalised pixels [B, 3, H, W] to logits [B, num_classes]."""
        bias = self.whitening.bias
        assert bias is not None
        x = F.conv2d(pixels, self.whitening.weight, bias if learn_whitening_bias else bias.detach())
        x = self.groups(F.gelu(x))
        logits: Tensor = self.head(x.amax(dim=(2, 3))) / self.head.in_features
        return logits


class _Group(nn.Module):
    """Two convolutions, each with a batch norm and GELU; the maximum over 2 x 2 pixels comes after the first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _Convolution(inputs, outputs), _Convolution(outputs, outputs)
        self.norm1, self.norm2 = (nn.BatchNorm2d(outputs, momentum=0.4) for _ in range(2))
        for norm in (self.norm1, self.norm2):
            norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class _Convolution(nn.Module):
    """A 3 x 3 convolution whose filters are the rows of a matrix, which Muon asks for."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs * 9))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Let the first filters pass their input on; the others are random."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)
        nn.init.dirac_(self.filters()[: self.inputs])

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filters(), padding=1)

    def filters(self) -> Tensor:
        return self.weight.view(-1, self.inputs, 3, 3)


def _folded(convolution: _Convolution, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return a convolution's filters and biases with the batch norm that follows it in evaluation.

    A maximum between the two does not matter: the norm's factors are positive.
    """
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return convolution.filters() * scale[:, None, None, None], norm.bias - norm.running_mean * scale


def _even(pixels: Tensor) -> Tensor:
    rows, columns = pixels.shape[2:]
    return pixels[:, :, : rows - rows % _WHITENING_EDGE, : columns - columns % _WHITENING_EDGE]


class TeacherTrainer:
    """The training of a recipe's teacher, resumable at every epoch with the same bits.

    Args:
        recipe: has a `teacher`.
        folder: where `teacher.pt` lies, or goes.
        dtype: of the activations and their gradients; weights are float32.

    Raises:
        TrainingError: the pictures are too small or too few; or the state is that of another teacher, or damaged.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: TrainingData,
        num_classes: int,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        assert recipe.teacher is not None
        self._recipe: Teacher = recipe.teacher
        self._key = TeacherRun.of(recipe)
        self._data, self._path, self._device, self._dtype = data, folder / TEACHER_FILE, device, dtype
        rows, columns = data.validation_pixels.shape[2:]
        if min(rows, columns) < 9:
            raise TrainingError(f"recipe: teacher: pictures of {rows}x{columns} pixels are too small, at least 9x9")
        if len(data.labels) < self._recipe.batch_size:
            count = len(data.labels)
            raise TrainingError(f"recipe: teacher.batch_size: there are only {count} training images")
        self.net = TeacherNet(self._recipe.widths, num_classes)
        generator = torch.Generator().manual_seed(recipe.seed)
        sample = whitening_sample(data.pixels)
        self.net.reset_parameters(data.normalise(sample).cpu(), generator)
        self._mirrored_first = torch.rand(len(data.labels), generator=generator) < 0.5
        self.net.to(device)
        self._optimisers = _optimisers(self.net, self._recipe)
        self._peaks = [[group["lr"] for group in optimiser.param_groups] for optimiser in self._optimisers]
        self._epoch, self._seconds, self._cpu_seconds, self._accuracy = 0, 0.0, 0.0, 0.0
        if self._path.exists():
            self._load()

    def run(self) -> TeacherRecord:
        """Train what is left of the schedule; afterwards `net` answers, and learns no more."""
        while self._epoch < self._recipe.epochs:
            self._run_epoch()
            self._save()
        self.net.eval().requires_grad_(False)
        return TeacherRecord(self._accuracy, self._seconds, self._cpu_seconds, count_parameters(self.net))

    @torch.no_grad()
    def logits(self, pixels: Tensor) -> Tensor:
        """Return the answers, float32 [B, num_classes], to normalised pixels [B, 3, H, W]."""
        with self._arithmetic():
            logits: Tensor = self.net(pixels.float().contiguous(memory_format=torch.channels_last))
        return logits.float()

    @torch.no_grad()
    def stem_weights(self, stem: ConvolutionalStem) -> dict[str, Tensor]:
        """Return the whitening filters and the first groups as a model's stem, batch norms folded into the filters.

        The whitening's 2 x 2 filters become the lower right of 3 x 3 ones, so that pictures lose no row or column.

        Returns:
            float32 by the names of the stem's parameters.

        Raises:
            TrainingError: the stem's convolutions are not the teacher's first ones.
        """
        whitening = self.net.whitening
        assert whitening.bias is not None
        layers = [(F.pad(whitening.weight, (1, 0, 1, 0)), whitening.bias)]
        for group in self.net.groups:
            assert isinstance(group, _Group)
            layers += [_folded(group.conv1, group.norm1), _folded(group.conv2, group.norm2)]
        count = len(stem.widths)
        usable = ConvolutionalStem(
            widths=tuple(len(weight) for weight, _ in layers)[:count],
            kernels=((3,) * len(layers))[:count],
            strides=((1,) * len(layers))[:count],
            pools=((1,) + (2, 1) * len(self.net.groups))[:count],
            activation="gelu",
        )
        if stem != usable:
            raise TrainingError(
                f"recipe: distillation.inherit_stem: architecture.conv_stem is {stem}; the teacher has {usable}"
            )
        parameters: dict[str, Tensor] = {}
        for i, (weight, bias) in enumerate(layers[:count]):
            parameters |= {f"{i}.weight": weight, f"{i}.bias": bias}
        return parameters

    def _arithmetic(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16)

    def _run_epoch(self) -> None:
        began, cpu_began = time.monotonic(), time.process_time()
        self.net.train()
        generator = torch.Generator(self._device).manual_seed(self._key.seed * 1_000_003 + self._epoch + 1)
        steps = len(self._data.labels) // self._recipe.batch_size
        loss_sum = torch.zeros((), device=self._device)
        for step, (pixels, labels) in enumerate(self._batches(generator)):
            progress = (self._epoch + step / steps) / self._recipe.epochs
            loss_sum += self._step(pixels, labels, progress)
        loss = loss_sum.item() / (steps * self._recipe.batch_size)
        if not math.isfinite(loss):
            raise TrainingError(f"teacher: epoch {self._epoch + 1}: the loss is not finite; lower its learning rate")
        self._accuracy = self._validate()
        self._epoch += 1
        self._seconds += time.monotonic() - began
        self._cpu_seconds += time.process_time() - cpu_began
        text = "teacher: epoch %d of %d: loss %.3f, validation accuracy %.2f%%, %.0f s, %.0f CPU s"
        accuracy = 100 * self._accuracy
        logger.info(text, self._epoch, self._recipe.epochs, loss, accuracy, self._seconds, self._cpu_seconds)

    def _batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield an epoch's pixels, normalised, and labels; the last, smaller batch is left out."""
        data, recipe, device = self._data, self._recipe, self._device
        size = (data.validation_pixels.shape[2], data.validation_pixels.shape[3])
        order = torch.randperm(len(data.labels), generator=generator, device=device).to(data.pixels.device)
        for batch in torch.split(order, recipe.batch_size)[: len(order) // recipe.batch_size]:
            images = random_crop(data.pixels[batch].to(device), recipe.crop_padding, generator, size)
            if recipe.flip:
                mirrored = self._mirrored_first[batch.cpu()].logical_xor(torch.tensor(self._epoch % 2 == 1))
                images = torch.where(mirrored.to(device)[:, None, None, None], images.flip(-1), images)
            images = random_resample(images, recipe.resample, generator)
            yield data.normalise(images), data.labels[batch].to(device)

    def _step(self, pixels: Tensor, labels: Tensor, progress: float) -> Tensor:
        """Do one update; return the sum of the losses."""
        for optimiser, peaks in zip(self._optimisers, self._peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * (1 - progress)
        with self._arithmetic():
            pixels = pixels.contiguous(memory_format=torch.channels_last)
            logits = self.net(pixels, progress < _LEARN_WHITENING_BIAS)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=_SMOOTHING, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for module in self.net.modules():
                if isinstance(module, _Convolution):  # a batch norm follows: the norm sets no more than the pace
                    module.weight.mul_(len(module.weight) ** 0.5 / module.weight.norm())
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad()
        return loss.detach()

    def _validate(self) -> float:
        self.net.eval()
        right = 0
        for pixels, labels in zip(
            torch.split(self._data.validation_pixels, _VALIDATION_BATCH),
            torch.split(self._data.validation_labels, _VALIDATION_BATCH),
            strict=True,
        ):
            answers = self.logits(self._data.normalise(pixels.to(self._device))).argmax(dim=1)
            right += int((answers == labels.to(self._device)).sum())
        return right / len(self._data.validation_labels)

    def _save(self) -> None:
        state: dict[str, Any] = {
            "epoch": self._epoch,
            "seconds": self._seconds,
            "cpu_seconds": self._cpu_seconds,
            "accuracy": self._accuracy,
            "weights": self.net.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_state(self._path, self._key, state)

    def _load(self) -> None:
        state = read_state(self._path, self._key, self._device)
        self.net.load_state_dict(state["weights"])
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self._epoch, self._accuracy = state["epoch"], state["accuracy"]
        self._seconds, self._cpu_seconds = state["seconds"], state["cpu_seconds"]


def _optimisers(net: TeacherNet, recipe: Teacher) -> list[torch.optim.Optimizer]:
    """Return SGD for biases and head, and Muon for the convolutions; the loss is a sum over the batch."""
    if not hasattr(torch.optim, "Muon"):
        raise TrainingError(f"recipe: teacher needs torch 2.9 or later, this is {torch.__version__}")
    biases = [p for p in net.parameters() if p.requires_grad and p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": biases, "lr": _BIAS_RATE, "weight_decay": _DECAY / _BIAS_RATE},
        {"params": [net.head.weight], "lr": _HEAD_RATE, "weight_decay": _DECAY / _HEAD_RATE},
    ]
    convolutions = [module.weight for module in net.modules() if isinstance(module, _Convolution)]
    return [
        torch.optim.SGD(groups, lr=_HEAD_RATE, momentum=0.85, nesterov=True),
        torch.optim.Muon(
            convolutions, lr=recipe.learning_rate, momentum=0.6, nesterov=True, weight_decay=0.0, ns_steps=3
        ),
    ]
