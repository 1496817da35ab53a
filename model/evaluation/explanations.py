"""Measurement of how faithful maps are to the model that they explain, picture by picture and method by method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from model.checkpoint import Checkpoint
from model.errors import DatasetError
from model.evaluation.absent import Evidence, absent_peaks, absent_ranks
from model.evaluation.faithfulness import DEFAULT_STEPS, Maps, Score, blur, deletion, insertion
from model.evaluation.mosaic import mosaic_shares
from model.explanation.maps import cls_map
from model.explanation.methods import EXPLANATIONS, explain
from model.heads import own_head
from model.network.vit import VisionTransformer
from model.outputs import CLASS_SPECIFIC, MapRequest, Method

RANDOM: Final = "random"
RESAMPLES: Final = 2000
"""Number of resamples of the bootstrap (Efron 1979), which assumes nothing of the values' distribution."""
CONFIDENCE: Final = 0.95


class Estimate(NamedTuple):
    """A mean, and the interval that holds it with a confidence of 95 %."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class PictureResult:
    """What was measured of a picture with a method.

    Attributes:
        picture: its number.
        class_index: the class that the map is of: the best of the picture.
        deletion, insertion: areas under its score, 0...1; see `model.evaluation.faithfulness`.
        shares: of the class's map, in its quarter of each mosaic where it counts; see `model.evaluation.mosaic`.
        absent: peaks of absent classes' maps, with a class-specific method; see `model.evaluation.absent`.
    """

    picture: int
    method: str
    class_index: int
    deletion: float
    insertion: float
    shares: list[float] = field(default_factory=list)
    absent: list[float] = field(default_factory=list)


class MethodResult(NamedTuple):
    """What was measured of a method: means over pictures, quarters that count and absent classes, if any."""

    method: str
    deletion: Estimate
    insertion: Estimate
    mosaic: Estimate | None
    absent: Estimate | None


@dataclass(frozen=True)
class ExplanationResults:
    """What was measured of all methods.

    Attributes:
        pictures: an entry for each picture and method.
        quarters, counted: quarters of all mosaics, and how many of them counted.
        whole, mean_colour, blurred: mean score of the classes on the whole pictures, and where the two curves start.
    """

    pictures: list[PictureResult]
    quarters: int
    counted: int
    whole: float
    mean_colour: float
    blurred: float

    def methods(self, *, seed: int = 0) -> list[MethodResult]:
        """Return the means of each method; intervals are drawn over the same pictures for every method."""
        by_method: dict[str, list[PictureResult]] = {}
        for result in self.pictures:
            by_method.setdefault(result.method, []).append(result)
        return [_summarise(method, results, seed) for method, results in by_method.items()]


def model_score(model: VisionTransformer, checkpoint: Checkpoint) -> Score:
    """Return the function from normalised pixels to the scores that the service would answer."""
    scores = own_head(checkpoint.config, checkpoint.labels, checkpoint.temperature, checkpoint.multi_label)

    def score(pixels: Tensor) -> Tensor:
        return torch.from_numpy(scores.scores(model(pixels).logits.float().numpy()))

    return score


def model_evidence(model: VisionTransformer, checkpoint: Checkpoint) -> Evidence:
    """Return the function from normalised pixels and classes to the evidence that the service would answer."""
    scores = own_head(checkpoint.config, checkpoint.labels, checkpoint.temperature, checkpoint.multi_label)

    def evidence(pixels: Tensor, classes: Tensor) -> Tensor:
        return torch.from_numpy(scores.evidence(model(pixels).logits.float().numpy(), classes.numpy())[1])

    return evidence


def random_maps(grid: tuple[int, int], seed: int = 0) -> Maps:
    """Return a method that knows nothing, as a baseline: uniform noise, another map at each call."""
    generator = torch.Generator().manual_seed(seed)

    def maps(pixels: Tensor, classes: Tensor) -> Tensor:
        return torch.rand((len(classes), *grid), generator=generator).to(pixels.device)

    return maps


def cls_maps(model: VisionTransformer) -> Maps:
    """Return the method `cls`: the attention row of the last layer, its heads averaged; it knows no classes."""
    config = model.config

    @torch.no_grad()
    def maps(pixels: Tensor, classes: Tensor) -> Tensor:
        attention = model(pixels, (config.depth - 1,)).attention
        rows = attention[:, 0].float().cpu().numpy()
        return torch.from_numpy(cls_map(rows, head="mean", prefix_tokens=config.prefix_tokens, grid=config.grid)[0])

    return maps


def available_methods(model: VisionTransformer, *, seed: int = 0) -> dict[str, Maps]:
    """Return the methods that can be measured, by name; the random baseline is the first."""
    plain = {RANDOM: random_maps(model.config.grid, seed), "cls": cls_maps(model)}

    def of(method: Method) -> Maps:
        request = MapRequest(method)
        return lambda pixels, classes: explain(model, pixels, classes, request)[0]

    return plain | {method: of(method) for method in EXPLANATIONS}


def measure_explanations(
    score: Score,
    evidence: Evidence,
    methods: Mapping[str, Maps],
    read: Callable[[int], Tensor],
    count: int,
    *,
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
    progress: bool = False,
) -> ExplanationResults:
    """Measure deletion, insertion and mosaic share of maps of the best class of each picture, and of absent ones.

    There are as many mosaics as pictures, in a random order: each picture stands once in every quarter.

    Args:
        score, evidence: of the model.
        methods: by name.
        read: takes a picture's number and returns its normalised pixels, float32 [C, H, W].
        count: of pictures.
        steps: of each deletion and insertion.
        seed: of the order in which pictures come together in mosaics, and of the absent classes.

    Raises:
        DatasetError: no pictures.
    """
    if not count:
        raise DatasetError("nothing to evaluate: no images")
    bar = partial(tqdm, disable=None if progress else True)
    results: list[PictureResult] = []
    ends: list[list[float]] = []
    for number in bar(range(count), desc="explanations", unit="img"):
        picture = read(number)
        of_picture, at_ends = _measure_picture(score, evidence, methods, picture, number, steps, seed)
        results += of_picture
        ends.append(at_ends)
    by_picture = {(result.picture, result.method): result for result in results}
    order = np.random.default_rng(seed).permutation(count).tolist()
    mosaics = [
        [order[(start + quarter) % count] for quarter in range(4)] for start in range(count if count >= 4 else 0)
    ]
    classes = torch.tensor([result.class_index for result in results[:: len(methods)]])
    counted = 0
    for members in bar(mosaics, desc="mosaics", unit="img"):
        pictures = torch.stack([read(number) for number in members])
        shares = mosaic_shares(score, methods, pictures, classes[members].to(pictures.device))
        counted += len(shares)
        for quarter, by_method in shares.items():
            for method, share in by_method.items():
                by_picture[members[quarter], method].shares.append(share)
    return ExplanationResults(results, 4 * len(mosaics), counted, *np.mean(ends, axis=0).tolist())


def _measure_picture(
    score: Score, evidence: Evidence, methods: Mapping[str, Maps], picture: Tensor, number: int, steps: int, seed: int
) -> tuple[list[PictureResult], list[float]]:
    """Return the result of each method, and the class's scores of the whole, mean-coloured and blurred picture."""
    blurred = blur(picture)
    with torch.no_grad():
        scores = score(torch.stack((picture, torch.zeros_like(picture), blurred)))
    best = scores[0].argmax()
    index = int(best)
    ranks = absent_ranks(scores.shape[1], np.random.default_rng((seed, number)))
    ranked = scores[0].argsort(descending=True, stable=True)[[0, *ranks]]
    results = []
    for method, maps in methods.items():
        relevance = maps(picture.unsqueeze(0), best.unsqueeze(0))[0].detach()
        lowered = deletion(score, picture, relevance, index, steps=steps)
        raised = insertion(score, picture, blurred, relevance, index, steps=steps)
        absent = absent_peaks(maps, evidence, picture, ranked) if method in CLASS_SPECIFIC else []
        results.append(PictureResult(number, method, index, lowered, raised, absent=absent))
    return results, scores[:, index].tolist()


def _summarise(method: str, results: Sequence[PictureResult], seed: int) -> MethodResult:
    def mean(values: Sequence[Sequence[float]]) -> Estimate | None:
        sums = np.array([sum(of_picture) for of_picture in values], dtype=np.float64)
        return estimate_mean(sums, np.array([len(of_picture) for of_picture in values]), seed=seed)

    lowered = mean([[result.deletion] for result in results])
    raised = mean([[result.insertion] for result in results])
    assert lowered is not None
    assert raised is not None
    shares, absent = ([getattr(result, name) for result in results] for name in ("shares", "absent"))
    return MethodResult(method, lowered, raised, mean(shares), mean(absent))


def estimate_mean(sums: NDArray[np.float64], counts: NDArray[np.int64], *, seed: int = 0) -> Estimate | None:
    """Return the mean of all values and its percentile interval over resamples of the pictures that they belong to.

    Values of the same picture are alike, so they are drawn together; pictures are drawn with replacement.

    Args:
        sums: float64 [N], of each picture's values.
        counts: int64 [N], how many values each picture has; may be 0.
        seed: of the resamples; methods that are compared need the same seed.

    Returns:
        None where there are no values.
    """
    if not counts.sum():
        return None
    generator = np.random.default_rng(seed)
    means: list[float] = []
    while len(means) < RESAMPLES:
        drawn = generator.integers(0, len(sums), len(sums))
        if total := counts[drawn].sum():  # a resample may miss every picture that has values
            means.append(float(sums[drawn].sum() / total))
    low, high = np.quantile(means, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))
