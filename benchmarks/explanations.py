"""Faithfulness of explanation methods: `python -m benchmarks.explanations --data DIR`.

Each map is of the class that the model itself puts first, so pictures need no labels. Three
measures:

- Deletion and insertion (Petsiuk et al. 2018, RISE, https://arxiv.org/abs/1806.07421): patches are
  taken in descending order of the map. Deletion replaces them by the mean colour: after a good map
  the score falls at once, and the area under it is small. Insertion puts them into a blurred
  picture: the score rises at once, and the area is large.
- Mosaic, after the Focus of Arias-Duart et al. 2022 (https://arxiv.org/abs/2109.15035): four
  pictures at half size form a 2 x 2 mosaic, and the figure is the share of a class's map in its own
  quarter; chance is 0.25.

Pictures with missing patches differ from the training pictures, and only the order of a map counts
(Wu et al. 2024, https://arxiv.org/abs/2404.01415). Compare methods on the same model and pictures,
and with the random baseline.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks.record import table
from model.checkpoint import load_checkpoint
from model.explanation.explain import explain
from model.explanation.maps import cls_map
from model.images.preprocess import preprocess
from model.methods import methods
from model.network.vit import VisionTransformer
from model.outputs import MapRequest
from model.runtime.torch_pass import Normalise

# Takes normalised pixels, float32 [B, C, H, W]; returns the score of each class, float32 [B, K],
# 0...1.
Score = Callable[[Tensor], Tensor]

# Takes normalised pixels, float32 [B, C, H, W], and classes, int64 [B]; returns a map of each, [B,
# rows, columns].
Maps = Callable[[Tensor, Tensor], Tensor]

_EXPLANATIONS = tuple(name for name in methods() if name != "cls")
_METHODS = ("cls", *_EXPLANATIONS)
RANDOM = "random"
# A quarter of a mosaic counts if its class is among so many best ones: of other classes the model
# saw nothing.
TOP = 10

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
# Standard deviation of the blur as a share of the picture's shorter side: 14 pixels of 224, 2 of
# 32.
_BLUR = 1 / 16


@dataclass(frozen=True)
class Measured:
    """Measurements of a method: an area, 0...1, for each picture, and the share of each quarter
    that counts.
    """

    deletion: list[float] = field(default_factory=list)
    insertion: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def means(self) -> list[float | None]:
        """Return the means of deletion, insertion and mosaic; None where nothing counts."""
        return [
            sum(each) / len(each) if each else None
            for each in (self.deletion, self.insertion, self.shares)
        ]


def replace_patches(start: Tensor, end: Tensor, relevance: Tensor, counts: Tensor) -> Tensor:
    """Return a picture for each count: `start` with that many of the most relevant patches taken
    from `end`.

    Args:
        start: float32 [C, H, W].
        end: float32 [C, H, W], or what broadcasts to it.
        relevance: [rows, columns]; patches of equal value are taken row by row.
        counts: int64 [S].

    Returns:
        float32 [S, C, H, W].
    """
    rank = relevance.flatten().argsort(descending=True, stable=True).argsort()
    taken = (rank < counts.to(rank.device).unsqueeze(1)).float().reshape(-1, 1, *relevance.shape)
    return torch.where(
        F.interpolate(taken, size=start.shape[-2:], mode="nearest-exact").bool(), end, start
    )


@torch.no_grad()
def area_under_score(
    score: Score, start: Tensor, end: Tensor, relevance: Tensor, label: int, steps: int
) -> float:
    """Return the area, 0...1, under the score of a class as patches are replaced in a map's order.

    The area is a sum of trapezoids over the share of replaced patches: see `replace_patches`.
    """
    counts = torch.tensor(
        sorted({round(step * relevance.numel() / steps) for step in range(steps + 1)})
    )
    scores = score(replace_patches(start, end, relevance, counts))[:, label].double().cpu()
    return float(torch.trapezoid(scores, counts.double() / relevance.numel()))


def blur(picture: Tensor) -> Tensor:
    """Return a picture, float32 [C, H, W], blurred by a Gaussian of 1/16 of its shorter side;
    borders are mirrored.
    """
    channels, height, width = picture.shape
    sigma = _BLUR * min(height, width)
    radius = min(int(np.ceil(3 * sigma)), height - 1, width - 1)
    kernel = (
        -(torch.arange(-radius, radius + 1, device=picture.device) ** 2) / (2 * sigma**2)
    ).exp()
    kernel = (kernel / kernel.sum()).expand(channels, 1, 1, -1)
    padded = F.pad(picture.unsqueeze(0), (radius, radius, radius, radius), mode="reflect")
    return F.conv2d(
        F.conv2d(padded, kernel, groups=channels), kernel.transpose(2, 3), groups=channels
    ).squeeze(0)


def mosaic(pictures: Tensor) -> Tensor:
    """Return four pictures, [4, C, H, W], at half size as a mosaic, [C, H, W], in reading order."""
    high, wide = ((size // 2, size - size // 2) for size in pictures.shape[-2:])
    rows = [
        [
            F.adaptive_avg_pool2d(pictures[2 * row + column], (high[row], wide[column]))
            for column in range(2)
        ]
        for row in range(2)
    ]
    return torch.cat([torch.cat(row, dim=-1) for row in rows], dim=-2)


def counted_quarters(scores: Tensor, classes: Tensor) -> list[int]:
    """Return the quarters, 0...3, whose class no other quarter has and is among the best of the
    mosaic.

    Args:
        scores: float32 [K], of the mosaic.
        classes: int64 [4], the best class of each picture by itself.
    """
    best = scores.topk(min(TOP, len(scores))).indices.tolist()
    labels = classes.tolist()
    return [
        quarter
        for quarter, label in enumerate(labels)
        if labels.count(label) == 1 and label in best
    ]


def quarter_share(relevance: Tensor, quarter: int) -> float:
    """Return the share, 0...1, of a map's positive part in one of its quarters.

    A middle row or column of patches counts by halves. A map without a positive part has the share
    of an even map.
    """
    positive = relevance.double().clamp_min(0).repeat_interleave(2, 0).repeat_interleave(2, 1)
    row, column = divmod(quarter, 2)
    rows, columns = relevance.shape
    part = positive[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
    return float(part.sum() / positive.sum()) if positive.any() else 0.25


def methods_of(model: VisionTransformer) -> dict[str, Maps]:
    """Return the measured methods by name: noise as the baseline, the CLS row, and explanations."""
    generator = torch.Generator().manual_seed(0)
    config = model.config

    def noise(pixels: Tensor, classes: Tensor) -> Tensor:
        return torch.rand((len(classes), *config.grid), generator=generator).to(pixels.device)

    @torch.no_grad()
    def cls(pixels: Tensor, classes: Tensor) -> Tensor:
        rows = model(pixels, (config.depth - 1,)).attention[:, 0].float().cpu().numpy()
        return torch.from_numpy(
            cls_map(rows, head="mean", prefix_tokens=config.prefix_tokens, grid=config.grid)[0]
        )

    def of(method: str, pixels: Tensor, classes: Tensor) -> Tensor:
        return explain(model, pixels, classes, MapRequest(method))[0]

    return {RANDOM: noise, "cls": cls, **{method: partial(of, method) for method in _EXPLANATIONS}}


def measure(
    score: Score,
    methods: Mapping[str, Maps],
    read: Callable[[int], Tensor],
    count: int,
    *,
    steps: int,
) -> dict[str, Measured]:
    """Measure each method on maps of the best class of each picture, and of mosaics.

    There are as many mosaics as pictures, in a random order: each picture stands once in every
    quarter.

    Args:
        read: takes a picture's number, 0...count-1; returns its normalised pixels, float32 [C, H,
        W].
        steps: of each deletion and insertion.
    """
    found = {name: Measured() for name in methods}
    labels: list[int] = []
    for number in tqdm(range(count), desc="deletion, insertion", disable=None):
        picture = read(number)
        blurred = blur(picture)
        none = picture.new_zeros(())
        with torch.no_grad():
            best = score(picture.unsqueeze(0)).argmax(dim=1)
        label = int(best)
        labels.append(label)
        for name, maps in methods.items():
            relevance = maps(picture.unsqueeze(0), best)[0].detach()
            found[name].deletion.append(
                area_under_score(score, picture, none, relevance, label, steps)
            )
            found[name].insertion.append(
                area_under_score(score, blurred, picture, relevance, label, steps)
            )
    order = np.random.default_rng(0).permutation(count)
    for start in tqdm(range(count if count >= 4 else 0), desc="mosaics", disable=None):
        members = np.roll(order, -start)[:4].tolist()
        whole = mosaic(torch.stack([read(number) for number in members])).unsqueeze(0)
        classes = torch.tensor([labels[number] for number in members], device=whole.device)
        with torch.no_grad():
            quarters = counted_quarters(score(whole)[0], classes)
        for name, maps in methods.items() if quarters else ():
            relevances = maps(whole.expand(len(quarters), -1, -1, -1), classes[quarters])
            for quarter, relevance in zip(quarters, relevances, strict=True):
                found[name].shares.append(quarter_share(relevance, quarter))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the methods on a folder of pictures in float32 on the CPU, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.explanations", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="pictures, in subfolders too")
    parser.add_argument("--checkpoint", default="bundled")
    parser.add_argument(
        "--methods", nargs="*", choices=_METHODS, default=_METHODS, help="default: all"
    )
    parser.add_argument(
        "--steps", type=int, default=28, help="of deletion and insertion (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    files = sorted(path for path in arguments.data.rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not files:
        parser.error(f"{arguments.data}: no pictures")
    checkpoint = load_checkpoint(arguments.checkpoint)
    model = checkpoint.build()
    normalise = Normalise(checkpoint.preprocess)

    def read(number: int) -> Tensor:
        pixels = torch.from_numpy(preprocess(files[number].read_bytes(), checkpoint.preprocess))
        normalised: Tensor = normalise(pixels.unsqueeze(0))[0]
        return normalised

    def score(pixels: Tensor) -> Tensor:
        return torch.from_numpy(checkpoint.head.scores(model(pixels).logits.float().cpu().numpy()))

    methods = {
        name: maps
        for name, maps in methods_of(model).items()
        if name in (RANDOM, *arguments.methods)
    }
    found = measure(score, methods, read, len(files), steps=arguments.steps)
    print(
        f"{checkpoint.name}: {len(files)} pictures, {arguments.steps} steps, "
        f"{len(found[RANDOM].shares)} quarters count"
    )
    rows = [
        (name, *("-" if each is None else f"{each:.3f}" for each in one.means()))
        for name, one in found.items()
    ]
    print(table(("method", "deletion (lower)", "insertion (higher)", "mosaic (higher)"), rows))


if __name__ == "__main__":
    main()
