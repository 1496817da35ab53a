"""Calibration on labelled pictures that a model was not trained on: sets of labels.

A set of labels includes the right one with a stated coverage, and is empty for a picture that is
unlike all classes. This is split conformal prediction. The outputs of a model for N such pictures
bound how often a set misses, whatever the model, if future pictures are like those (exchangeable
with them). Thresholds have the finite-sample correction, ceil((N + 1) level) of N (Angelopoulos &
Bates 2021, https://arxiv.org/abs/2107.07511).

- A label is in the set unless its score is too low for a right label (least ambiguous sets:
  Sadinle, Lei & Wasserman 2019, https://arxiv.org/abs/1609.00451).
- The set is empty, and the model abstains, if the picture's energy is too low for a picture of
  these classes. The energy is the logarithm of the summed exponentials of its logits (Liu et al.
  2020, https://arxiv.org/abs/2010.03759), used as a conformal p-value (Bates et al. 2021,
  https://arxiv.org/abs/2104.08279).

The coverage allows a share of misses; each of the two thresholds gets half of it. Adaptive
sets were larger at the same coverage, and hardly ever empty; see docs/training.md (APS: Romano,
Sesia & Candes 2020, https://arxiv.org/abs/2006.02544; RAPS: Angelopoulos et al. 2021,
https://arxiv.org/abs/2009.14193). No torch is needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.errors import CheckpointError
from model.heads import SOFTMAX, Form

# File of a native folder.
CALIBRATION_FILE: Final = "calibration.json"

# Most pictures whose scores are kept. With so many, the coverage of a calibration is off by about a
# third of a percentage point.
MAX_PICTURES: Final = 4096


def pictures_needed(coverage: float) -> int:
    """Return the fewest pictures N for a coverage: ceil((N + 1) level) is at most N.

    Args:
        coverage: above 0 and below 1.
    """
    level = (1 + coverage) / 2  # of each of the two thresholds
    return math.ceil(round(level / (1 - level), 6))


class Fit(NamedTuple):
    """Fitted scores: logits are divided by the temperature and then get their form."""

    temperature: float
    form: Form = SOFTMAX


def scores_and_energies(
    logits: NDArray[np.floating], temperature: float, form: Form = SOFTMAX
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the scores, float64 [B, K], and the energies, float64 [B], of logits [B, K].

    The form changes only the scores.
    """
    scaled = logits.astype(np.float64) / temperature
    # Logits that are not finite: the caller gets an error, and no set of labels.
    with np.errstate(invalid="ignore"):
        powers = np.exp(-form.negative_log_scores(scaled))
        exponentials = np.exp(-SOFTMAX.negative_log_scores(scaled))
    energies: NDArray[np.float64] = scaled.max(axis=1) + np.log(exponentials.sum(axis=1))
    return powers / powers.sum(axis=1, keepdims=True), energies


@dataclass(frozen=True, slots=True)
class LabelSets:
    """Gives pictures their sets of labels.

    Attributes:
        temperature: divisor of the logits.
        least_score: lowest score of a label in a set.
        least_energy: lowest energy of a picture whose set is not empty.
        form: form of the scores.
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
        """Return the sets with a coverage.

        Args:
            temperature: temperature of scores and energies.
            scores: score of the right label of each calibration picture, ascending; at least
                `pictures_needed`.
            energies: energies of these pictures, ascending.
            coverage: above 0 and below 1.
            form: form of the scores.
        """
        level = (1 + coverage) / 2  # of each of the two thresholds
        # Rounded because 40 x 0.975 is not quite 39 in floating point.
        rank = math.ceil(round((len(scores) + 1) * level, 6))
        return cls(temperature, scores[-rank], energies[-rank], form)

    def __call__(self, logits: NDArray[np.float32]) -> list[NDArray[np.int64]]:
        """Return the labels of each picture's set, best first; empty if the model abstains.

        Args:
            logits: [B, K].
        """
        scores, energies = scores_and_energies(logits, self.temperature, self.form)
        label_sets: list[NDArray[np.int64]] = []
        for is_member, row in zip(self.members(scores, energies), scores, strict=True):
            labels = np.flatnonzero(is_member)
            label_sets.append(labels[np.argsort(-row[labels], kind="stable")])
        return label_sets

    def members(
        self, scores: NDArray[np.float64], energies: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Return which labels are in the set of each picture, bool [B, K].

        Args:
            scores, energies: from `scores_and_energies`.
        """
        return (scores >= self.least_score) & (energies >= self.least_energy)[:, np.newaxis]


_Digits = Annotated[float, Field(strict=True, allow_inf_nan=False)]

# `strict=False` because JSON has lists and no tuples.
_Pictures: Final = Field(min_length=1, max_length=MAX_PICTURES, strict=False)


class Calibration(BaseModel):
    """`calibration.json` of a native folder, as `vitserve calibrate` writes it.

    Attributes:
        data: name of the pictures.
        pictures: number of all pictures, including pictures for the temperature, whose scores are
            not here.
        temperature, form: replace those in `config.json`.
        scores, energies: see `LabelSets.of`.
        digest: digest of the other fields, of the weights, and of how pictures become pixels; see
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
                f"{len(self.scores)} scores and {len(self.energies)} energies: the numbers differ"
            )
        for values in (self.scores, self.energies):
            if any(low > high for low, high in pairwise(values)):
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
        """Return the calibration from the scores of right labels and the energies, [N] each."""
        return cls.model_validate(
            {
                "data": data,
                "pictures": pictures,
                "temperature": fit.temperature,
                "form": fit.form,
                "scores": _ascending_digits(scores),
                "energies": _ascending_digits(energies),
            }
        )


def _ascending_digits(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return values in ascending order, with seven digits each."""
    return tuple(float(f"{value:.7g}") for value in np.sort(values).tolist())


def label_sets_of(
    calibration: Calibration | None, coverage: float, source: str, unused: str = ""
) -> LabelSets:
    """Return the sets with a coverage, from the calibration of the checkpoint `source`.

    Args:
        unused: why the checkpoint's calibration is not used.

    Raises:
        CheckpointError: the checkpoint is not calibrated, or on too few pictures.
    """
    if unused:
        raise CheckpointError(f"{source}: a coverage of {coverage:g} (VIT_COVERAGE): {unused}")
    if calibration is None:
        raise CheckpointError(
            f"{source}: is not calibrated, but a coverage of {coverage:g} (VIT_COVERAGE) needs it: "
            "`vitserve calibrate CHECKPOINT --data labelled --out folder` writes a calibrated copy"
        )
    count = len(calibration.scores)
    needed = pictures_needed(coverage)
    if count < needed:
        raise CheckpointError(
            f"{source}: calibrated on {count} pictures, too few for a coverage of {coverage:g}: "
            f"{needed} are enough"
        )
    return LabelSets.of(
        calibration.temperature,
        calibration.scores,
        calibration.energies,
        coverage,
        calibration.form,
    )
