"""Calibration on labelled pictures that a model was not trained on: its temperature, and sets of labels; no torch.

The temperature makes the right labels most likely (Guo et al. 2017, https://arxiv.org/abs/1706.04599). Sets of labels
hold the right one with a stated coverage, and are empty for what is unlike all labels.

Split conformal prediction: what a model gave for N labelled pictures that it was not trained on bounds how often a
set misses, whatever the model, as long as the pictures to come are like those (exchangeable with them). Thresholds have
the finite-sample correction, ceil((N + 1) level) of N (Angelopoulos & Bates 2021, https://arxiv.org/abs/2107.07511).

- A label is in the set if its score is not too low for a right one (least ambiguous sets: Sadinle, Lei & Wasserman
  2019, https://arxiv.org/abs/1609.00451).
- The set is empty, and the model abstains, if the picture's energy, the logarithm of the summed exponentials of its
  logits, is too low for a picture of these classes: an energy score (Liu et al. 2020, https://arxiv.org/abs/2010.03759)
  as a conformal p-value (Bates et al. 2021, https://arxiv.org/abs/2104.08279).

Each of the two may miss half of what the coverage leaves, so that both together hold it. Adaptive sets (APS: Romano,
Sesia & Candes 2020, https://arxiv.org/abs/2006.02544; RAPS: Angelopoulos et al. 2021,
https://arxiv.org/abs/2009.14193) were larger at the same coverage, and hardly ever empty: see docs/training.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Annotated, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.errors import CheckpointError, DatasetError

CALIBRATION_FILE: Final = "calibration.json"
"""Of a native folder."""

MAX_PICTURES: Final = 4096
"""Pictures whose numbers are kept: with so many, the coverage of a calibration is off by a third of a point or so."""

MIN_PICTURES: Final = 30
"""The fewest pictures that a temperature is fitted to; from fewer it would be noise."""

TEMPERATURE_RANGE: Final = (0.05, 20.0)
"""Range in which a temperature is sought; on pictures that are answered without an error the best would be 0."""

_BISECTIONS: Final = 20
_HALVINGS: Final = 20
"""Times that pictures are halved at random to measure sets of labels."""


def fit_temperature(logits: NDArray[np.floating], truth: NDArray[np.int64]) -> float:
    """Return the temperature at which the scores make the right labels most likely (Guo et al. 2017, section 4.2).

    It is 1 where there are fewer than `MIN_PICTURES`, or where all are answered right, so that a lower temperature
    would always look better.

    Args:
        logits: [N, K], of pictures that were not trained on.
        truth: int64 [N], their classes.
    """
    logits = logits.astype(np.float64)
    if len(truth) < MIN_PICTURES or bool((logits.argmax(axis=1) == truth).all()):
        return 1.0
    right = logits[np.arange(len(truth)), truth].mean()
    low, high = map(math.log, TEMPERATURE_RANGE)
    for _ in range(_BISECTIONS):
        # The loss is convex in 1 / temperature. Its slope there: the mean logit by the scores, less that of the truth.
        middle = (low + high) / 2
        scores, _energies = scores_and_energies(logits, math.exp(middle))
        if (scores * logits).sum(axis=1).mean() > right:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def pictures_needed(coverage: float) -> int:
    """Return how many pictures thresholds for a coverage take: the least N of which ceil((N + 1) level) are at most N.

    Args:
        coverage: above 0 and below 1.
    """
    level = _level(coverage)
    return math.ceil(round(level / (1 - level), 6))


def scores_and_energies(
    logits: NDArray[np.floating], temperature: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the scores, float64 [B, K], and the energies, float64 [B], of logits [B, K]."""
    scaled = logits.astype(np.float64) / temperature
    most = scaled.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # logits that are not finite: whoever asked gets an error, not the set
        exponentials = np.exp(scaled - most)
    total = exponentials.sum(axis=1, keepdims=True)
    return exponentials / total, (most + np.log(total))[:, 0]


@dataclass(frozen=True, slots=True)
class LabelSets:
    """Gives pictures their sets of labels.

    Attributes:
        temperature: logits are divided by it.
        least_score: of a label in a set.
        least_energy: of a picture that has a set.
    """

    temperature: float
    least_score: float
    least_energy: float

    @classmethod
    def of(cls, temperature: float, scores: Sequence[float], energies: Sequence[float], coverage: float) -> Self:
        """Return the sets of a coverage.

        Args:
            temperature: of both.
            scores: of the right label of each calibration picture, ascending.
            energies: of each, ascending.
            coverage: above 0 and below 1.

        Raises:
            ValueError: there are fewer pictures than `pictures_needed`.
        """
        count = len(scores)
        # Rounded, as 40 x 0.975 is not quite 39.
        rank = math.ceil(round((count + 1) * _level(coverage), 6))
        if rank > count:
            needed = pictures_needed(coverage)
            raise ValueError(f"{count} pictures are too few for a coverage of {coverage:g}: {needed} are enough")
        return cls(temperature, scores[count - rank], energies[count - rank])

    def __call__(self, logits: NDArray[np.float32]) -> list[NDArray[np.int64]]:
        """Return the labels of each picture's set, best first; none of a picture that the model abstains from.

        Args:
            logits: [B, K].
        """
        scores, energies = scores_and_energies(logits, self.temperature)
        members = [np.flatnonzero(row) for row in self.members(scores, energies)]
        return [each[np.argsort(-row[each], kind="stable")] for each, row in zip(members, scores, strict=True)]

    def members(self, scores: NDArray[np.float64], energies: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which labels are in the set of each picture, bool [B, K], by what `scores_and_energies` gives."""
        return (scores >= self.least_score) & (energies >= self.least_energy)[:, np.newaxis]


_Digits = Annotated[float, Field(strict=True, allow_inf_nan=False)]

_Pictures: Final = Field(min_length=1, max_length=MAX_PICTURES, strict=False)
"""A list of JSON is as good as a tuple."""


class Calibration(BaseModel):
    """`calibration.json` of a native folder, as `vitserve calibrate` writes it.

    Attributes:
        data: what the pictures are called.
        pictures: all of them; those that the temperature was fitted on have no numbers here.
        temperature: takes the place of the one in `config.json`.
        scores, energies: of `LabelSets.of`.
        digest: of everything else here, of the weights, and of how pictures become pixels; see `native`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["vitserve-calibration"] = "vitserve-calibration"
    version: Annotated[int, Field(ge=1, le=1)] = 1
    data: Annotated[str, Field(max_length=1000)]
    pictures: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)]
    scores: Annotated[tuple[Annotated[_Digits, Field(ge=0, le=1)], ...], _Pictures]
    energies: Annotated[tuple[_Digits, ...], _Pictures]
    digest: str = ""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if len(self.scores) != len(self.energies):
            raise ValueError(f"{len(self.scores)} scores and {len(self.energies)} energies: expected as many")
        if any(low > high for values in (self.scores, self.energies) for low, high in pairwise(values)):
            raise ValueError("scores and energies: expected them ascending")
        return self

    @classmethod
    def of(
        cls, data: str, pictures: int, temperature: float, scores: NDArray[np.float64], energies: NDArray[np.float64]
    ) -> Self:
        """Return the calibration by these scores of right labels and energies, [N] each."""
        ascending = [tuple(float(f"{each:.7g}") for each in np.sort(part).tolist()) for part in (scores, energies)]
        return cls(data=data, pictures=pictures, temperature=temperature, scores=ascending[0], energies=ascending[1])


def label_sets_of(calibration: Calibration | None, coverage: float, source: str) -> LabelSets:
    """Return the sets of a coverage by the calibration of the checkpoint `source`.

    Raises:
        CheckpointError: it was not calibrated, or on too few pictures.
    """
    if calibration is None:
        raise CheckpointError(
            f"{source}: is not calibrated, which a coverage of {coverage:g} (VIT_COVERAGE) needs: "
            "`vitserve calibrate CHECKPOINT --data labelled --out folder` writes a folder that has it"
        )
    try:
        return LabelSets.of(calibration.temperature, calibration.scores, calibration.energies, coverage)
    except ValueError as error:
        raise CheckpointError(f"{source}: calibrated on {error}") from None


@dataclass(frozen=True)
class MeasuredSets:
    """Sets of labels, measured on labelled pictures that they were not calibrated on.

    Attributes:
        covered: share of the pictures whose right label is in the set.
        labels: mean number of labels in a set, the empty ones included.
        abstained: share of the pictures whose set is empty.
    """

    covered: float
    labels: float
    abstained: float

    @classmethod
    def of(cls, members: NDArray[np.bool_], truth: NDArray[np.int64]) -> Self:
        """Return the measures of sets, bool [N, K], of pictures of these classes, [N]."""
        sizes = members.sum(axis=1)
        covered = members[np.arange(len(truth)), truth]
        return cls(float(covered.mean()), float(sizes.mean()), float((sizes == 0).mean()))


def require_pictures(count: int, coverage: float, data: str) -> None:
    """Raise `DatasetError` unless so many pictures are enough for a coverage."""
    needed = pictures_needed(coverage)
    if count < needed:
        possible = f", and these for {math.floor(100 * (count - 1) / (count + 1)) / 100:g}" if count > 2 else ""
        raise DatasetError(
            f"{data}: {count} pictures are too few for a coverage of {coverage:g}: {needed} are enough{possible} "
            "(--coverage)"
        )


def calibrate(
    logits: NDArray[np.float32],
    truth: NDArray[np.int64],
    temperature: float,
    data: str,
    coverages: Sequence[float],
    *,
    seed: int = 0,
) -> tuple[Calibration, int, dict[float, MeasuredSets]]:
    """Return a calibration, how many pictures its temperature was fitted to, and how sets of these coverages do.

    The temperature is fitted to a random fifth, if there are enough pictures and errors among them, and the sets are
    made by the other pictures, so that these are to the fitted scores as all pictures to come. How sets do is the mean
    over random halvings of those: one half calibrates, the other is measured.

    Args:
        logits: [N, K], of pictures that were not trained on.
        truth: int64 [N], their classes.
        temperature: of the checkpoint, which stays where too few pictures are there to fit another.
        data: what the pictures are called.
        coverages: the first must be possible; of the others, those that half of the pictures are too few for are not
            measured.

    Raises:
        DatasetError: the pictures are too few.
    """
    require_pictures(len(truth), coverages[0], data)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(truth))
    fitted, rest = np.split(order, [len(order) // 5])
    is_enough = len(fitted) >= MIN_PICTURES and len(rest) >= pictures_needed(coverages[0])
    if not is_enough or bool((logits[fitted].argmax(axis=1) == truth[fitted]).all()):
        fitted, rest = order[:0], order
    else:
        temperature = fit_temperature(logits[fitted], truth[fitted])
    logits, truth, half = logits[rest], truth[rest], len(rest) // 2
    scores, energies = scores_and_energies(logits, temperature)
    measured: dict[float, MeasuredSets] = {}
    for coverage in sorted(each for each in coverages if pictures_needed(each) <= half):
        runs: list[tuple[float, float, float]] = []
        for _ in range(_HALVINGS):
            some, others = np.split(generator.permutation(len(rest)), [half])
            known = np.sort(scores[some, truth[some]]).tolist(), np.sort(energies[some]).tolist()
            members = LabelSets.of(temperature, *known, coverage).members(scores[others], energies[others])
            runs.append(astuple(MeasuredSets.of(members, truth[others])))
        measured[coverage] = MeasuredSets(*np.mean(runs, axis=0).tolist())
    return calibration_of(data, logits, truth, temperature, fitted=len(fitted)), len(fitted), measured


def calibration_of(
    data: str, logits: NDArray[np.float32], truth: NDArray[np.int64], temperature: float, *, fitted: int = 0
) -> Calibration:
    """Return what sets of labels are made by: scores and energies of at most `MAX_PICTURES` pictures.

    Args:
        data: what the pictures are called.
        logits: [N, K], of pictures that were not trained on.
        truth: int64 [N], their classes.
        temperature: of the scores.
        fitted: number of further pictures, which the temperature alone was fitted to.
    """
    scores, energies = scores_and_energies(logits[:MAX_PICTURES], temperature)
    right = scores[np.arange(len(scores)), truth[: len(scores)]]
    return Calibration.of(data, len(truth) + fitted, temperature, right, energies)


def _level(coverage: float) -> float:
    """Return the coverage of each of the two parts."""
    return (1 + coverage) / 2
