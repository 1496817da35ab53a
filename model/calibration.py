"""Calibration on labelled pictures that a model was not trained on: its scores, and sets of labels;
no torch.

The temperature makes the right labels most likely (Guo et al. 2017,
https://arxiv.org/abs/1706.04599); where it is not enough, there is a form of the scores, see
`Form`. Sets of labels hold the right one with a stated coverage, and are empty for what is unlike
all labels.

Split conformal prediction: what a model gave for N labelled pictures that it was not trained on
bounds how often a set misses, whatever the model, as long as the pictures to come are like those
(exchangeable with them). Thresholds have the finite-sample correction, ceil((N + 1) level) of N
(Angelopoulos & Bates 2021, https://arxiv.org/abs/2107.07511).

- A label is in the set if its score is not too low for a right one (least ambiguous sets: Sadinle, Lei & Wasserman
  2019, https://arxiv.org/abs/1609.00451).
- The set is empty, and the model abstains, if the picture's energy, the logarithm of the summed exponentials of its
  logits, is too low for a picture of these classes: an energy score (Liu et al. 2020,
  https://arxiv.org/abs/2010.03759) as a conformal p-value (Bates et al. 2021,
  https://arxiv.org/abs/2104.08279).

Each of the two may miss half of what the coverage leaves, so that both together hold it. Adaptive
sets (APS: Romano, Sesia & Candes 2020, https://arxiv.org/abs/2006.02544; RAPS: Angelopoulos et al.
2021, https://arxiv.org/abs/2009.14193) were larger at the same coverage, and hardly ever empty: see
docs/training.md.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise, product
from typing import Annotated, Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.errors import CheckpointError, DatasetError
from model.heads import SOFTMAX, Form

# Of a native folder.
CALIBRATION_FILE: Final = "calibration.json"

# Pictures whose numbers are kept: with so many, the coverage of a calibration is off by a third of
# a point or so.
MAX_PICTURES: Final = 4096

# The fewest pictures that a temperature is fitted to; from fewer it would be noise.
MIN_PICTURES: Final = 30

# Range in which a temperature is sought; on pictures that are answered without an error the best
# would be 0.
TEMPERATURE_RANGE: Final = (0.05, 20.0)

# Of the logarithms of temperature and power, and of the crowding.
_RANGES: Final = np.log([TEMPERATURE_RANGE, (0.2, 5.0), (0.1, 10.0)]).T

# Of the search in these ranges, first and last.
_STEPS: Final = (0.5, 4e-3)

_FOLDS: Final = 5
# That a form is fitted to: of very many classes, fewer pictures have them.
_MOST_LOGITS: Final = 2_000_000

# Times that pictures are halved at random to measure sets of labels.
_HALVINGS: Final = 20


# What can be fitted: by one number, by two, and by three.
FORMS: Final = (
    "a temperature",
    "a power",
    "a power that depends on how crowded the best classes are",
)


class Fit(NamedTuple):
    """Scores as they are fitted: logits are divided by the temperature."""

    temperature: float
    form: Form = SOFTMAX


def fit_scores(
    logits: NDArray[np.floating],
    truth: NDArray[np.int64],
    numbers: int = 1,
    start: Fit = Fit(1.0),  # noqa: B008
) -> Fit:
    """Return the temperature, and beyond one number the form, at which the scores make the right
    labels most likely.

    It is `start` where there are fewer than `MIN_PICTURES`, or where all are answered right, so
    that a lower temperature would always look better.

    Args:
        logits: [N, K], of pictures that were not trained on.
        truth: int64 [N], their classes.
        numbers: 1 ... 3; see `FORMS`.
        start: where the search begins.
    """
    if len(truth) < MIN_PICTURES or bool((logits.argmax(axis=1) == truth).all()):
        return start
    logits, step = logits.astype(np.float64), _STEPS[0]
    found = np.array([math.log(start.temperature), math.log(start.form.power), start.form.crowding])
    least = float(losses(logits, truth, _fit_of(found)).mean())
    moves = np.array(
        [(*each, 0, 0)[:3] for each in product((-1, 0, 1), repeat=numbers) if any(each)]
    )
    while step > _STEPS[1]:
        tried = np.clip(found + step * moves, *_RANGES)
        means = [float(losses(logits, truth, _fit_of(each)).mean()) for each in tried]
        best = int(np.argmin(means))
        if means[best] < least:
            found, least = tried[best], means[best]
        else:
            step /= 2
    return _fit_of(found)


def _fit_of(numbers: NDArray[np.float64]) -> Fit:
    temperature, power, crowding = numbers.tolist()
    return Fit(math.exp(temperature), Form(power=math.exp(power), crowding=crowding))


def losses(logits: NDArray[np.floating], truth: NDArray[np.int64], fit: Fit) -> NDArray[np.float64]:
    """Return the negative log-likelihood of each label [N] by logits [N, K], in nats."""
    falls = fit.form.falls(logits.astype(np.float64) / fit.temperature)
    found: NDArray[np.float64] = falls[np.arange(len(truth)), truth] + np.log(
        np.exp(-falls).sum(axis=1)
    )
    return found


def choose_fit(
    logits: NDArray[np.floating], truth: NDArray[np.int64], before: Fit
) -> tuple[Fit, str]:
    """Return the scores of the form that cross-validation chooses, and its name of `FORMS`; see
    `fit_scores`.

    A number more must lower the mean loss of what was held out by more than its standard error, and
    so must the first: else it is `before`, without a name.
    """
    count = max(_MOST_LOGITS // logits.shape[1], 10 * MIN_PICTURES)
    logits, truth = logits[:count], truth[:count]
    fold, fit, chosen, least = (
        np.arange(len(truth)) % _FOLDS,
        Fit(1.0),
        (before, ""),
        losses(logits, truth, before),
    )
    for numbers, form in enumerate(FORMS, start=1):
        fit, held_out = fit_scores(logits, truth, numbers, fit), np.empty(len(truth))
        for held in (fold == number for number in range(_FOLDS)):
            of_others = fit_scores(logits[~held], truth[~held], numbers, fit)
            held_out[held] = losses(logits[held], truth[held], of_others)
        gain = least - held_out
        if gain.mean() > gain.std() / math.sqrt(len(gain)):
            chosen, least = (fit, form), held_out
    return chosen


def pictures_needed(coverage: float) -> int:
    """Return how many pictures thresholds for a coverage take: the least N of which ceil((N + 1)
    level) are at most N.

    Args:
        coverage: above 0 and below 1.
    """
    level = (1 + coverage) / 2  # of each of the two parts
    return math.ceil(round(level / (1 - level), 6))


def scores_and_energies(
    logits: NDArray[np.floating], temperature: float, form: Form = SOFTMAX
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the scores, float64 [B, K], and the energies, float64 [B], of logits [B, K]; a form is
    of scores alone.
    """
    scaled = logits.astype(np.float64) / temperature
    with np.errstate(
        invalid="ignore"
    ):  # logits that are not finite: whoever asked gets an error, not the set
        powers, exponentials = np.exp(-form.falls(scaled)), np.exp(-SOFTMAX.falls(scaled))
    energies: NDArray[np.float64] = scaled.max(axis=1) + np.log(exponentials.sum(axis=1))
    return powers / powers.sum(axis=1, keepdims=True), energies


@dataclass(frozen=True, slots=True)
class LabelSets:
    """Gives pictures their sets of labels.

    Attributes:
        temperature: logits are divided by it.
        least_score: of a label in a set.
        least_energy: of a picture that has a set.
        form: of the scores.
    """

    temperature: float
    least_score: float
    least_energy: float
    form: Form = SOFTMAX

    @classmethod
    def of(
        cls,
        temperature: float,
        scores: Sequence[float],
        energies: Sequence[float],
        coverage: float,
        form: Form = SOFTMAX,
    ) -> Self:
        """Return the sets of a coverage.

        Args:
            temperature: of both.
            scores: of the right label of each calibration picture, ascending; `pictures_needed` or
            more.
            energies: of each, ascending.
            coverage: above 0 and below 1.
            form: of the scores.
        """
        level = (1 + coverage) / 2  # of each of the two
        rank = math.ceil(
            round((len(scores) + 1) * level, 6)
        )  # rounded, as 40 x 0.975 is not quite 39
        return cls(temperature, scores[-rank], energies[-rank], form)

    def __call__(self, logits: NDArray[np.float32]) -> list[NDArray[np.int64]]:
        """Return the labels of each picture's set, best first; none of a picture that the model
        abstains from.

        Args:
            logits: [B, K].
        """
        scores, energies = scores_and_energies(logits, self.temperature, self.form)
        members = [np.flatnonzero(row) for row in self.members(scores, energies)]
        return [
            each[np.argsort(-row[each], kind="stable")]
            for each, row in zip(members, scores, strict=True)
        ]

    def members(
        self, scores: NDArray[np.float64], energies: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Return which labels are in the set of each picture, bool [B, K], by what
        `scores_and_energies` gives.
        """
        return (scores >= self.least_score) & (energies >= self.least_energy)[:, np.newaxis]


_Digits = Annotated[float, Field(strict=True, allow_inf_nan=False)]

# A list of JSON is as good as a tuple.
_Pictures: Final = Field(min_length=1, max_length=MAX_PICTURES, strict=False)


class Calibration(BaseModel):
    """`calibration.json` of a native folder, as `vitserve calibrate` writes it.

    Attributes:
        data: what the pictures are called.
        pictures: all of them; those that the temperature was fitted on have no numbers here.
        temperature, form: take the place of those in `config.json`.
        scores, energies: of `LabelSets.of`.
        digest: of everything else here, of the weights, and of how pictures become pixels; see
        `native`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["vitserve-calibration"] = "vitserve-calibration"
    version: Annotated[int, Field(ge=1, le=1)] = 1
    data: Annotated[str, Field(max_length=1000)]
    pictures: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)]
    form: Form = SOFTMAX
    scores: Annotated[tuple[Annotated[_Digits, Field(ge=0, le=1)], ...], _Pictures]
    energies: Annotated[tuple[_Digits, ...], _Pictures]
    digest: str = ""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if len(self.scores) != len(self.energies):
            raise ValueError(
                f"{len(self.scores)} scores and {len(self.energies)} energies: expected as many"
            )
        if any(
            low > high for values in (self.scores, self.energies) for low, high in pairwise(values)
        ):
            raise ValueError("scores and energies: expected them ascending")
        return self

    @classmethod
    def of(
        cls,
        data: str,
        pictures: int,
        fit: Fit,
        scores: NDArray[np.float64],
        energies: NDArray[np.float64],
    ) -> Self:
        """Return the calibration by these scores of right labels and energies, [N] each."""
        right, other = (
            tuple(float(f"{each:.7g}") for each in np.sort(part).tolist())
            for part in (scores, energies)
        )
        fitted = {"temperature": fit.temperature, "form": fit.form}
        return cls.model_validate(
            {"data": data, "pictures": pictures, **fitted, "scores": right, "energies": other}
        )


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
    count, needed = len(calibration.scores), pictures_needed(coverage)
    if count < needed:
        raise CheckpointError(
            f"{source}: calibrated on {count} pictures, too few for a coverage of {coverage:g}: {needed} are enough"
        )
    return LabelSets.of(
        calibration.temperature,
        calibration.scores,
        calibration.energies,
        coverage,
        calibration.form,
    )


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
        possible = (
            f", and these for {math.floor(100 * (count - 1) / (count + 1)) / 100:g}"
            if count > 2
            else ""
        )
        raise DatasetError(
            f"{data}: {count} pictures are too few for a coverage of {coverage:g}: {needed} are enough{possible} "
            "(--coverage)"
        )


class MeasuredScores(NamedTuple):
    """How scores do on labelled pictures that they were not fitted to.

    Attributes:
        loss: mean negative log-likelihood of the right class, in nats.
        error: see `calibration_error`.
    """

    loss: float
    error: float

    @classmethod
    def of(cls, logits: NDArray[np.float32], truth: NDArray[np.int64], fit: Fit) -> Self:
        """Return the measures of logits [N, K] of pictures of these classes, [N]."""
        confidence = scores_and_energies(logits, *fit)[0].max(axis=1)
        error = calibration_error(confidence.astype(np.float32), logits.argmax(axis=1) == truth)
        return cls(float(losses(logits, truth, fit).mean()), error)


def calibration_error(
    confidence: NDArray[np.float32], correct: NDArray[np.bool_], *, bins: int = 15
) -> float:
    """Return the expected calibration error (Guo et al. 2017, https://arxiv.org/abs/1706.04599); 0
    is perfect.

    It is the mean gap between confidence and accuracy over bins of equal width, (lower, upper], by
    their images.

    Args:
        confidence: [N], the top-1 score of each image, 0...1.
        correct: [N], whether that answer was right.
    """
    bin_of = np.clip(
        np.ceil(confidence.astype(np.float64) * bins).astype(np.int64) - 1, 0, bins - 1
    )
    gaps = np.bincount(bin_of, weights=correct - confidence.astype(np.float64), minlength=bins)
    return float(np.abs(gaps).sum() / len(correct))


class Calibrated(NamedTuple):
    """What `calibrate` gives.

    Attributes:
        calibration: for `calibration.json`.
        fitted: how many pictures the scores were fitted to.
        form: a name of `FORMS`, or none where they stayed as they were.
        before, after: scores of the pictures that they were not fitted to.
        sets: how sets of labels do, by their coverage.
    """

    calibration: Calibration
    fitted: int
    form: str
    before: MeasuredScores
    after: MeasuredScores
    sets: dict[float, MeasuredSets]


def calibrate(
    logits: NDArray[np.float32],
    truth: NDArray[np.int64],
    fit: Fit,
    data: str,
    coverages: Sequence[float],
    *,
    seed: int = 0,
) -> Calibrated:
    """Return a calibration, and how scores and sets of these coverages do with it.

    The scores are fitted to a random fifth, if there are enough pictures and errors among them, and
    the sets are made by the other pictures, so that these are to the fitted scores as all pictures
    to come. How sets do is the mean over random halvings of those: one half calibrates, the other
    is measured.

    Args:
        logits: [N, K], of pictures that were not trained on.
        truth: int64 [N], their classes.
        fit: of the checkpoint, which stays where too few pictures are there to fit another.
        data: what the pictures are called.
        coverages: the first must be possible; of the others, those that half of the pictures are
            too few for are not measured.

    Raises:
        DatasetError: the pictures are too few.
    """
    require_pictures(len(truth), coverages[0], data)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(truth))
    fitted, rest = np.split(order, [len(order) // 5])
    is_enough = len(fitted) >= MIN_PICTURES and len(rest) >= pictures_needed(coverages[0])
    if not is_enough or bool((logits[fitted].argmax(axis=1) == truth[fitted]).all()):
        fitted, rest, found, form = order[:0], order, fit, ""
    else:
        found, form = choose_fit(logits[fitted], truth[fitted], fit)
    logits, truth, half = logits[rest], truth[rest], len(rest) // 2
    scores, energies = scores_and_energies(logits, *found)
    measured: dict[float, MeasuredSets] = {}
    for coverage in sorted(each for each in coverages if pictures_needed(each) <= half):
        runs: list[tuple[float, float, float]] = []
        for _ in range(_HALVINGS):
            some, others = np.split(generator.permutation(len(rest)), [half])
            known = np.sort(scores[some, truth[some]]).tolist(), np.sort(energies[some]).tolist()
            members = LabelSets.of(found.temperature, *known, coverage).members(
                scores[others], energies[others]
            )
            runs.append(astuple(MeasuredSets.of(members, truth[others])))
        measured[coverage] = MeasuredSets(*np.mean(runs, axis=0).tolist())
    before, after = (MeasuredScores.of(logits, truth, each) for each in (fit, found))
    calibration = calibration_of(data, logits, truth, found, fitted=len(fitted))
    return Calibrated(calibration, len(fitted), form, before, after, measured)


def calibration_of(
    data: str, logits: NDArray[np.float32], truth: NDArray[np.int64], fit: Fit, *, fitted: int = 0
) -> Calibration:
    """Return what sets of labels are made by: scores and energies of at most `MAX_PICTURES`
    pictures.

    Args:
        data: what the pictures are called.
        logits: [N, K], of pictures that were not trained on.
        truth: int64 [N], their classes.
        fit: of the scores.
        fitted: number of further pictures, which the scores alone were fitted to.
    """
    scores, energies = scores_and_energies(logits[:MAX_PICTURES], *fit)
    right = scores[np.arange(len(scores)), truth[: len(scores)]]
    return Calibration.of(data, len(truth) + fitted, fit, right, energies)
