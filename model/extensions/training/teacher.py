"""The teacher: a small convolutional network that is trained first, for the model to imitate.

Convolutions learn from few pictures in few epochs, and a Vision Transformer does not. It learns
from the teacher's answers on the augmented pictures instead (Touvron et al. 2020,
https://arxiv.org/abs/2012.12877, section 5.4). The network and its training follow Jordan 2024,
https://arxiv.org/abs/2404.00498, and its variant with Muon
(https://github.com/KellerJordan/cifar10-airbench). The first layer is fixed whitening filters.
Convolutions start at the identity and keep their norm, batch norms lack a scale, and mirroring
alternates from epoch to epoch. The teacher itself is not served.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.errors import TrainingError
from model.extensions.training.optimisers import as_matrices, muon, set_rates, step_all
from model.extensions.training.recipe import Augmentation, Recipe, Teacher
from model.extensions.training.training_data import Arithmetic, TrainingData
from model.layer_config import ConvolutionalStem
from model.network.vit import count_parameters

logger = logging.getLogger(__name__)

_WHITENING_EDGE: Final = 2
_WHITENING_IMAGES: Final = 5000
# Added to the patches' variances, so that directions without content are not amplified.
_WHITENING_FLOOR: Final = 1e-2
# Share of the schedule during which the first layer's biases learn. After it, gradients stop before
# that layer.
_LEARN_WHITENING_BIAS: Final = 0.2
_HEAD_RATE: Final = 0.67
_BIAS_RATE: Final = 0.053
_DECAY: Final = 4e-3
_SMOOTHING: Final = 0.1
# Smallest side in pixels of which the first layer and three poolings leave at least one.
_SMALLEST: Final = 9


class TeacherNet(nn.Module):
    """Whitening filters, three groups that halve the resolution, a maximum, and a linear head.

    Args:
        widths: numbers of channels of the groups.
        num_classes: number of logits.
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
        """Initialise with the whitening filters of normalised pictures, float32 [N, 3, H, W]."""
        filters = whitening_filters(pixels, _WHITENING_EDGE)
        self.whitening.weight.copy_(torch.cat([filters, -filters]))
        nn.init.zeros_(self.whitening_bias)
        for convolution in self.convolutions():
            bound = 1 / math.sqrt(convolution.weight[0].numel())
            nn.init.uniform_(convolution.weight, -bound, bound, generator=generator)
            # The first filters pass their input on.
            nn.init.dirac_(convolution.weight[: convolution.in_channels])
        bound = math.sqrt(3)  # standard deviation 1
        nn.init.uniform_(self.head.weight, -bound, bound, generator=generator)

    def forward(self, pixels: Tensor, learn_whitening_bias: bool = False) -> Tensor:
        """Map normalised pixels [B, 3, H, W] to logits [B, num_classes]."""
        bias = self.whitening_bias if learn_whitening_bias else self.whitening_bias.detach()
        x = self.groups(F.gelu(F.conv2d(pixels, self.whitening.weight, bias)))
        logits: Tensor = self.head(x.amax(dim=(2, 3))) / self.head.in_features
        return logits

    @property
    def whitening_bias(self) -> Tensor:
        """Return the biases of the first layer."""
        assert self.whitening.bias is not None
        return self.whitening.bias

    def convolutions(self) -> list[nn.Conv2d]:
        """Return the layers that Muon trains, in order."""
        return [module for module in self.groups.modules() if isinstance(module, nn.Conv2d)]


def whitening_filters(pixels: Tensor, patch_size: int) -> Tensor:
    """Return filters whose outputs on these pictures are uncorrelated and have unit variance.

    A filter is an eigenvector of the patches' covariance, divided by the root of its eigenvalue
    (https://arxiv.org/abs/2404.00498, section 3.2).

    Args:
        pixels: float32 [N, C, H, W], normalised.
        patch_size: side of the filters in pixels.

    Returns:
        float32 [C patch_size^2, C, patch_size, patch_size], in descending order of variance.
    """
    patches = F.unfold(pixels, patch_size, stride=patch_size).transpose(1, 2).flatten(0, 1)
    variance, direction = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters: Tensor = (direction / (variance.clamp_min(0) + _WHITENING_FLOOR).sqrt()).T.flip(0)
    return filters.reshape(-1, pixels.shape[1], patch_size, patch_size)


class _Group(nn.Module):
    """Two convolutions, each with a batch norm and GELU; the first also with 2 x 2 max pooling."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs, momentum=0.4)
        self.norm2 = nn.BatchNorm2d(outputs, momentum=0.4)
        for norm in (self.norm1, self.norm2):
            norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


def _folded(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return filters and biases that replace a convolution and its batch norm in evaluation.

    Max pooling between the two changes nothing, because the norm's factors are positive.
    """
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return convolution.weight * scale[:, None, None, None], norm.bias - norm.running_mean * scale


def stem_weights(net: TeacherNet, stem: ConvolutionalStem) -> dict[str, Tensor]:
    """Return the teacher's first layers as the weights of a model's stem.

    Batch norms are folded into the convolutions. The 2 x 2 whitening filters become the lower right
    of 3 x 3 filters, so that pictures lose no row or column.

    Returns:
        float32 by the names of the stem's parameters.

    Raises:
        TrainingError: the stem differs from the teacher's first layers.
    """
    layers = [(F.pad(net.whitening.weight, (1, 0, 1, 0)), net.whitening_bias)]
    for group in net.groups:
        assert isinstance(group, _Group)
        layers += [_folded(group.conv1, group.norm1), _folded(group.conv2, group.norm2)]
    count = len(stem.widths)
    usable = ConvolutionalStem(
        widths=tuple(len(weight) for weight, _ in layers)[:count],
        kernels=((3,) * len(layers))[:count],
        strides=((1,) * len(layers))[:count],
        pools=((1,) + (2, 1) * len(net.groups))[:count],
        activation="gelu",
    )
    if stem != usable:
        raise TrainingError(
            f"recipe: teacher: architecture.conv_stem is {stem}; the teacher has {usable}"
        )
    parts = [(f"{i}.weight", weight) for i, (weight, _) in enumerate(layers[:count])]
    return dict(parts + [(f"{i}.bias", bias) for i, (_, bias) in enumerate(layers[:count])])


def train_teacher(
    net: TeacherNet, recipe: Recipe, data: TrainingData, run: Arithmetic
) -> dict[str, float]:
    """Train a teacher by its recipe, and switch it to evaluation.

    Returns:
        `validation_accuracy`, 0...1, `seconds` of training, and the number of `parameters`.

    Raises:
        TrainingError: the pictures are too small or too few, or training diverged.
    """
    teacher = recipe.teacher
    assert teacher is not None
    if min(data.size) < _SMALLEST:
        raise TrainingError(
            f"recipe: teacher: pictures of {data.size} pixels are too small, at least 9x9"
        )
    if len(data.train) < teacher.batch_size:
        raise TrainingError(
            f"recipe: teacher.batch_size: there are only {len(data.train)} training images"
        )
    began = time.monotonic()
    sample = data.normalise(torch.from_numpy(data.train.pixels[:_WHITENING_IMAGES]))
    net.reset_parameters(sample, torch.Generator().manual_seed(recipe.seed))
    net.to(run.device)
    filters = as_matrices(convolution.weight for convolution in net.convolutions())
    optimisers = _optimisers(net, teacher, filters)
    settings = Augmentation(crop_padding=4, flip=False, resample=teacher.resample)
    mirrored_first = np.random.default_rng(recipe.seed).random(len(data.train)) < 0.5
    accuracy = 0.0
    steps = len(data.train) // teacher.batch_size
    for epoch in range(teacher.epochs):
        net.train()
        loss_sum = torch.zeros((), device=run.device)
        batches = data.epoch(
            teacher.batch_size, settings, np.random.default_rng((recipe.seed, epoch))
        )
        for step, (indices, pixels, labels) in enumerate(batches):
            mirrored = torch.from_numpy(mirrored_first[indices] ^ (epoch % 2 == 1))
            pixels[mirrored] = pixels[mirrored].flip(-1)
            normalised = data.normalise(pixels.to(run.device))
            progress = (epoch + step / steps) / teacher.epochs
            loss_sum += _step(
                net, optimisers, filters, run, normalised, labels.to(run.device), progress
            )
        loss = loss_sum.item() / (steps * teacher.batch_size)
        if not math.isfinite(loss):
            raise TrainingError(
                f"teacher: epoch {epoch + 1}: the loss is not finite; lower its learning rate"
            )
        net.eval()
        answered = [
            answers(net, data.normalise(pixels.to(run.device)), run).argmax(1)
            for pixels in data.validation_batches()
        ]
        accuracy = float((torch.cat(answered).cpu().numpy() == data.validation.labels).mean())
        text = "teacher: epoch %d of %d: loss %.3f, validation accuracy %.2f%%, %.0f s"
        logger.info(text, epoch + 1, teacher.epochs, loss, 100 * accuracy, time.monotonic() - began)
    seconds = time.monotonic() - began
    return {
        "validation_accuracy": accuracy,
        "seconds": seconds,
        "parameters": count_parameters(net),
    }


def _step(
    net: TeacherNet,
    optimisers: Sequence[torch.optim.Optimizer],
    filters: Mapping[Tensor, Tensor],
    run: Arithmetic,
    pixels: Tensor,
    labels: Tensor,
    progress: float,
) -> Tensor:
    """Update the weights once, and return the sum of the losses."""
    set_rates(optimisers, 1 - progress)
    with run.autocast:
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        logits = net(pixels, progress < _LEARN_WHITENING_BIAS)
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=_SMOOTHING, reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        # A batch norm follows, so the filters' norm only sets how fast they turn.
        for convolution in net.convolutions():
            convolution.weight.mul_(len(convolution.weight) ** 0.5 / convolution.weight.norm())
    step_all(optimisers, filters)
    return loss.detach()


@torch.no_grad()
def answers(net: TeacherNet, pixels: Tensor, run: Arithmetic) -> Tensor:
    """Return a teacher's logits, float32 [B, num_classes], of normalised pixels [B, 3, H, W]."""
    with run.autocast:
        logits: Tensor = net(pixels.contiguous(memory_format=torch.channels_last))
    return logits.float()


def _optimisers(
    net: TeacherNet, recipe: Teacher, filters: Mapping[Tensor, Tensor]
) -> list[torch.optim.Optimizer]:
    """Return SGD for biases and head, and Muon for the convolutions.

    Their rates fit a loss that is summed over the batch.
    """
    biases = [p for p in net.parameters() if p.requires_grad and p.ndim == 1]
    groups = [
        {"params": biases, "lr": _BIAS_RATE, "weight_decay": _DECAY / _BIAS_RATE},
        {"params": [net.head.weight], "lr": _HEAD_RATE, "weight_decay": _DECAY / _HEAD_RATE},
    ]
    matrices = [{"params": list(filters.values()), "lr": recipe.learning_rate}]
    return [
        torch.optim.SGD(groups, lr=_HEAD_RATE, momentum=0.85, nesterov=True),
        muon(matrices, momentum=0.6, nesterov=True, weight_decay=0.0, ns_steps=3),
    ]
