"""The fit of a taught head to its examples, and the statistics of the head. Torch-free.

`python -m service.extensions.teach.fit FOLDER [json|text]` fits each head of the folder whose
examples have changed. Its log has the format of the service's log. The process holds the lock of
the folder, so it drops log lines instead of waiting for a slow reader.
"""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.errors import DatasetError, first_line
from model.extensions.taught.known_examples import KnownExamples, part_weights
from model.extensions.taught.linear_probe import FOLDS, Choice, fit_head, interval
from model.extensions.taught.taught_heads import Features, TaughtHead
from service.errors import SettingsError
from service.extensions.teach.errors import HeadsUnavailable
from service.extensions.teach.examples import Examples, HeadRow, too_few
from service.observe import logs
from vitserve.head_documents import Accuracy, Confusion, Knowledge, Suspect

logger = logging.getLogger("vitserve")

# A label with fewer pictures needs more, as does one with less than half of its pictures right.
_FEW: Final = 5
# An example is a suspect if another label is this many times as likely as its own.
_DOUBT: Final = 4.0
# Weight of an example in the confidence interval. It is below 1 because the heads of a
# cross-validation share most of their examples. For 432 heads of 10 to 200 pictures, the interval
# held the accuracy on other pictures in 96 % of cases, and with weight 1 in 94 %.
_COUNTED: Final = 0.75
# Most confusions, and most suspects.
_LISTED: Final = 100
# Rounds of cross-validation with fewer than `_MANY` examples, because small folds say little.
_ROUNDS: Final = 4
_MANY: Final = 1000
# On a busy machine, a fit then gets a tenth of a core. At 19 it got a hundredth, and took ten
# seconds for twenty pictures.
_NICENESS: Final = 10
# Share of a core's time for all fits. A fit slows the other threads of its core by about a fifth,
# at any priority.
_SHARE: Final = 0.2
_LINGER_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.05


def taught_head(
    features: NDArray[np.float32],
    labels: Sequence[str],
    numbers: Sequence[int],
    backbone: str,
    model: str,
) -> TaughtHead:
    """Fit a head to examples.

    Args:
        features: [N, D].
        labels, numbers: label and number of each example.
        backbone: name of the features.
        model: name of a model that gives them.

    Raises:
        DatasetError: there are too few examples (two labels need two each), or their features are
            not finite.
    """
    names = tuple(dict.fromkeys(labels))
    truth = np.array([names.index(label) for label in labels], np.int64)
    reason = too_few(Counter(labels))
    if reason:
        raise DatasetError(reason)
    is_finite = np.isfinite(features).all(axis=1)
    if not is_finite.all():
        number = numbers[int(is_finite.argmin())]
        raise DatasetError(f"the features of example {number} are not finite: remove it")
    rounds = _ROUNDS if len(truth) < _MANY else 1
    kind = Features.named(backbone)
    scales = kind.scales(features)
    fits = [fit_head(features, truth, names, scales=scales, seed=seed) for seed in range(rounds)]
    knowledge = _knowledge([choice for _, choice in fits], truth, names, numbers)
    known = KnownExamples.of(features, truth, part_weights(kind.parts))
    head = replace(fits[0][0], features=kind.pool, known=known)
    return TaughtHead(head, backbone, model, knowledge.model_dump_json())


def _knowledge(
    rounds: Sequence[Choice], truth: NDArray[np.int64], names: Sequence[str], numbers: Sequence[int]
) -> Knowledge:
    """Return the statistics of a head.

    Args:
        rounds: cross-validations of the same examples, each with other folds.
        truth: index of each example's label in `names`.
        numbers: number of each example.
    """
    rows = rounds[0].rows
    scores = np.mean([choice.scores for choice in rounds], axis=0)
    labels = truth[rows]
    answers = scores.argmax(axis=1)
    shares = [(choice.scores.argmax(axis=1) == labels).mean() for choice in rounds]
    share = float(np.mean(shares))
    low, high = interval(share * _COUNTED * len(rows), _COUNTED * len(rows))
    pairs = zip(labels.tolist(), answers.tolist(), strict=True)
    wrong = Counter((label, answer) for label, answer in pairs if label != answer)
    pictures = np.bincount(truth, minlength=len(names))
    held_out = np.bincount(labels, minlength=len(names))
    right = np.bincount(labels[labels == answers], minlength=len(names))
    needy = (pictures < _FEW) | (2 * right < held_out)
    likely = scores[np.arange(len(rows)), labels]
    doubtful = [
        row for row in np.argsort(likely, kind="stable") if scores[row].max() > _DOUBT * likely[row]
    ]
    return Knowledge(
        accuracy=Accuracy(value=share, low=low, high=high, folds=FOLDS),
        confusion=[
            Confusion(label=names[label], answered=names[answer], count=count)
            for (label, answer), count in wrong.most_common(_LISTED)
        ],
        suspects=[
            Suspect(
                number=numbers[rows[row]],
                label=names[labels[row]],
                likely=names[answers[row]],
                score=float(scores[row].max()),
            )
            for row in doubtful[:_LISTED]
        ],
        needs_more=[name for name, needs in zip(names, needy, strict=True) if needs],
        fitted_to=len(truth),
        fitted_at=datetime.now(UTC),
    )


def fit_changed(examples: Examples, share: float = 1.0, linger: float = 0.0) -> None:
    """Fit each head whose examples have changed, until all fits are up to date.

    Heads take turns, the smallest first. A head with too few examples loses its fit. If memory is
    too small, the previous fit stays.

    Args:
        share: share of a processor's time for all fits together; a rest follows each fit.
        linger: seconds to wait for changes after the last fit, because a process takes longer to
            start than to fit.
    """
    rests_until = 0.0
    ends = 0.0
    fitted_at: dict[int, float] = {}
    while True:
        stale = [head for head in examples.heads().values() if head.fitted_revision < head.revision]
        if not stale and time.monotonic() >= ends:
            return
        if not stale or time.monotonic() < rests_until:
            time.sleep(_LOOK_SECONDS)
            continue

        def turn(head: HeadRow) -> tuple[float, int]:
            """Order heads by their last fit, so that a busy head leaves others their turns."""
            return fitted_at.get(head.id, 0.0), sum(examples.state(head)[0].values())

        head = min(stale, key=turn)
        begun = time.process_time()
        _fit(examples, head)
        fitted_at[head.id] = time.monotonic()
        rests_until = time.monotonic() + (time.process_time() - begun) * (1 / share - 1)
        ends = max(time.monotonic() + linger, rests_until)


def _fit(examples: Examples, head: HeadRow) -> None:
    numbers, labels, features = examples.training_set(head)
    try:
        examples.keep(
            head, taught_head(features, labels, numbers, head.backbone, head.model).to_bytes()
        )
    except DatasetError as error:
        examples.keep(head, None, first_line(error))
    except (np.linalg.LinAlgError, MemoryError) as error:
        examples.keep(head, examples.state(head)[1], first_line(error))


if __name__ == "__main__":
    os.nice(_NICENESS)
    logs.configure(sys.argv[2] if len(sys.argv) > 2 else "text", "warning")
    logs.never_wait()
    try:
        fit_changed(Examples(Path(sys.argv[1])), _SHARE, _LINGER_SECONDS)
    except (HeadsUnavailable, SettingsError) as error:
        logger.error("%s", error)
        sys.exit(1)
