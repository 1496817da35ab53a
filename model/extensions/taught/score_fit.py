"""Scores fitted to labelled pictures, so that they are as high as the answers are often right.

A temperature makes the right labels most likely (Guo et al. 2017,
https://arxiv.org/abs/1706.04599). If that is not enough, the scores get a form; see
`model.heads.Form`. No torch is needed.
"""

import math
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.calibration import Fit
from model.heads import Form

# Fewest pictures that a temperature is fitted to; from fewer it would be noise.
MIN_PICTURES: Final = 30

# Range of the fitted temperature. Pictures that are all answered right would lead to 0.
TEMPERATURE_RANGE: Final = (0.05, 20.0)

# Ranges of the logarithms of temperature and power, and of the crowding.
_RANGES: Final = np.log([TEMPERATURE_RANGE, (0.2, 5.0), (0.1, 10.0)]).T

# First and last step of the search in these ranges.
_STEPS: Final = (0.5, 4e-3)

_FOLDS: Final = 5

# Most logits that a form is fitted to: with very many classes, fewer pictures.
_MOST_LOGITS: Final = 2_000_000

# What can be fitted: one number, two, and three.
FORMS: Final = (
    "a temperature",
    "a power",
    "a power that depends on how crowded the best classes are",
)


def fit_scores(
    logits: NDArray[np.floating],
    truth: NDArray[np.int64],
    numbers: int = 1,
    start: Fit = Fit(1.0),  # noqa: B008
) -> Fit:
    """Return the temperature, and the form from two numbers on, that make the truth most likely.

    Fewer than `MIN_PICTURES` pictures change nothing. Neither do pictures that are all answered
    right, because a lower temperature would always look better on them.

    Args:
        logits: logits of pictures that the model was not trained on, [N, K].
        truth: their classes, int64 [N].
        numbers: number of fitted numbers, 1 ... 3; see `FORMS`.
        start: start of the search.
    """
    if len(truth) < MIN_PICTURES or bool((logits.argmax(axis=1) == truth).all()):
        return start
    logits = logits.astype(np.float64)
    step = _STEPS[0]
    best = np.array([math.log(start.temperature), math.log(start.form.power), start.form.crowding])
    least = float(losses(logits, truth, _fit_of(best)).mean())
    moves = np.array(
        [(*move, 0, 0)[:3] for move in product((-1, 0, 1), repeat=numbers) if any(move)]
    )
    while step > _STEPS[1]:
        candidates = np.clip(best + step * moves, *_RANGES)
        means = [float(losses(logits, truth, _fit_of(numbers)).mean()) for numbers in candidates]
        winner = int(np.argmin(means))
        if means[winner] < least:
            best = candidates[winner]
            least = means[winner]
        else:
            step /= 2
    return _fit_of(best)


def spread_rows(count: int, most: int) -> NDArray[np.int64]:
    """Return at most so many of `count` rows, evenly spread, because pictures come by class."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


def _fit_of(numbers: NDArray[np.float64]) -> Fit:
    temperature, power, crowding = numbers.tolist()
    return Fit(math.exp(temperature), Form(power=math.exp(power), crowding=crowding))


def losses(logits: NDArray[np.floating], truth: NDArray[np.int64], fit: Fit) -> NDArray[np.float64]:
    """Return the negative log-likelihood of each label [N] by logits [N, K], in nats."""
    falls = fit.form.negative_log_scores(logits.astype(np.float64) / fit.temperature)
    log_sums = np.log(np.exp(-falls).sum(axis=1))
    loss_by_label: NDArray[np.float64] = falls[np.arange(len(truth)), truth] + log_sums
    return loss_by_label


def choose_fit(
    logits: NDArray[np.floating], truth: NDArray[np.int64], before: Fit
) -> tuple[Fit, str]:
    """Return the fit that cross-validation chooses, and the name of its form in `FORMS`.

    Each further number must lower the mean loss of held-out pictures by more than its standard
    error. If the first one does not, the fit is `before`, with an empty name.
    """
    rows = spread_rows(len(truth), max(_MOST_LOGITS // logits.shape[1], 10 * MIN_PICTURES))
    logits = logits[rows]
    truth = truth[rows]
    fold = np.arange(len(truth)) % _FOLDS
    fit = Fit(1.0)
    chosen = (before, "")
    least = losses(logits, truth, before)
    for numbers, form in enumerate(FORMS, start=1):
        fit = fit_scores(logits, truth, numbers, fit)
        held_out = np.empty(len(truth))
        for number in range(_FOLDS):
            is_held = fold == number
            fit_of_others = fit_scores(logits[~is_held], truth[~is_held], numbers, fit)
            held_out[is_held] = losses(logits[is_held], truth[is_held], fit_of_others)
        gain = least - held_out
        if gain.mean() > gain.std() / math.sqrt(len(gain)):
            chosen = (fit, form)
            least = held_out
    return chosen
