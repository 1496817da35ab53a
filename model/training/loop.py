"""The training loop: pictures in, weights out. Each batch is of random parts of pictures, which Pillow makes.

Each epoch draws all its random numbers from (seed, epoch): the same recipe gives the same bits on the same device.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn
from tqdm import tqdm

from model.checkpoint import Checkpoint
from model.config import Size
from model.data.pictures import Images
from model.errors import TrainingError
from model.network.layers.attention import Attention, plain_attention
from model.network.vit import VisionTransformer
from model.runtime.device import choose_dtype
from model.runtime.torch_pass import Normalise
from model.training.recipe import Recipe

logger = logging.getLogger(__name__)

# Pictures that random parts are resized from are kept larger than the model's input by this factor.
MARGIN: Final = 256 / 224

# Least and largest width / height of a crop.
_CROP_RATIO: Final = (3 / 4, 4 / 3)
# How often a crop that does not fit is drawn again, as in torchvision and timm.
_ATTEMPTS: Final = 10


def fine_tune(
    start: Checkpoint, recipe: Recipe, pictures: Images, device: torch.device
) -> tuple[dict[str, Tensor], list[float]]:
    """Return trained weights, float32 on the CPU by name, and the mean loss of each epoch.

    Args:
        start: what is trained.
        pictures: at least a batch, of any size.

    Raises:
        TrainingError: the loss is no longer finite.
    """
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    # float16 would need loss scaling; only devices older than 2020 have it alone.
    in_bfloat16 = choose_dtype(recipe.precision, device) == torch.bfloat16
    model = VisionTransformer(start.vit)
    model.load_state_dict(start.tensors)
    for module in model.modules() if in_bfloat16 and device.type == "cpu" else ():
        if isinstance(module, Attention):
            module.attend = plain_attention
    model.to(device).train()
    optimiser, normalise = optimiser_of(model, recipe), Normalise(start.preprocess).to(device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16)
    losses: list[float] = []
    steps, began = len(pictures) // recipe.batch_size, time.monotonic()
    for epoch in range(recipe.epochs):
        loss_sum = torch.zeros((), device=device)
        drawn = batches(pictures, start.preprocess.size, recipe, np.random.default_rng((recipe.seed, epoch)))
        bar = tqdm(drawn, total=steps, desc=f"epoch {epoch + 1}/{recipe.epochs}", disable=None)
        for step, (images, labels) in enumerate(bar, start=epoch * steps):
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * rate_factor(step / (recipe.epochs * steps), recipe.warmup)
            with autocast:
                pixels = normalise(images.to(device)).contiguous(memory_format=torch.channels_last)
                logits = model(pixels).logits.float()
            loss = F.cross_entropy(logits, labels.to(device), label_smoothing=recipe.label_smoothing)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            optimiser.step()
            optimiser.zero_grad()
            loss_sum += loss.detach()
        losses.append(loss_sum.item() / steps)
        if not math.isfinite(losses[-1]):
            raise TrainingError(f"epoch {epoch + 1}: the loss is not finite; lower the learning rate")
        logger.info("epoch %d: loss %.3f, %.0f s", epoch + 1, losses[-1], time.monotonic() - began)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}, losses


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


def batches(
    pictures: Images, size: Size, recipe: Recipe, generator: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an epoch's batches, each augmented while the one before it is used; a last, smaller one is left out.

    Args:
        size: (rows, columns) of the model's input.

    Yields:
        Pixels, uint8 [B, rows, columns, C]; their labels, int64 [B].
    """
    order = generator.permutation(len(pictures))
    parts = order[: len(order) - len(order) % recipe.batch_size].reshape(-1, recipe.batch_size)

    def augmented(image: Image.Image) -> NDArray[np.uint8]:
        image = random_resized_crop(image, size, recipe.resized_crop, generator)
        return np.asarray(ImageOps.mirror(image) if recipe.flip and generator.random() < 0.5 else image)

    def read(indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        pixels = np.ascontiguousarray(pictures.pixels[indices].transpose(0, 2, 3, 1))
        changed = np.stack([augmented(Image.fromarray(each)) for each in pixels])
        return torch.from_numpy(changed), torch.from_numpy(pictures.labels[indices])

    with ThreadPoolExecutor(1) as reader:
        following = reader.submit(read, parts[0])
        for each in parts[1:]:
            present, following = following, reader.submit(read, each)
            yield present.result()
        yield following.result()


def random_resized_crop(
    image: Image.Image, size: Size, least_share: float, generator: np.random.Generator
) -> Image.Image:
    """Resize a random part of a picture to `size`.

    Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 6; torchvision's `RandomResizedCrop`. Where no part
    of an allowed shape was drawn (very long pictures), it is the largest part of allowed shape in the middle.

    Args:
        least_share: of the picture's area that the part covers, above 0 and up to 1.
    """
    width = min(image.width, round(image.height * _CROP_RATIO[1]))
    height = min(image.height, round(image.width / _CROP_RATIO[0]))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    for _ in range(_ATTEMPTS):
        area = generator.uniform(least_share, 1) * image.width * image.height
        ratio = math.exp(generator.uniform(math.log(_CROP_RATIO[0]), math.log(_CROP_RATIO[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= image.width and 0 < high <= image.height:
            width, height = wide, high
            left, top = (int(generator.integers(room + 1)) for room in (image.width - wide, image.height - high))
            break
    box = (left, top, left + width, top + height)
    return image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)
