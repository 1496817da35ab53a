"""The fit of a taught head to its examples, and what the head then knows of itself; no torch.

`python -m service.extensions.teach.fit FOLDER [json|text]` fits each head of the folder whose examples have
changed. Its log has the format of the service's, and waits for no reader: it holds the lock of the
folder.
"""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.errors import DatasetError, first_line
from model.features import Known
from model.linear_probe import FOLDS, Choice, fit_head, interval
from model.taught_heads import Features, TaughtHead
from service.errors import HeadsUnavailable, SettingsError
from service.extensions.teach.examples import Examples, HeadRow, too_few
from service.observe import logs
from vitserve.head_documents import Accuracy, Confusion, Knowledge, Suspect

logger = logging.getLogger("vitserve")

# A label with fewer pictures needs more, and so does one of which less than half are answered
# right.
_FEW: Final = 5
# How much likelier than its own another label of an example is that makes it a suspect.
_DOUBT: Final = 4.0
# What an example counts in the interval of the accuracy: the heads that it is held out from share
# most of theirs.  Of 432 heads of 10 to 200 pictures, intervals of whole ones held the accuracy on
# others in 94 %, and these in 96 %.
_COUNTED: Final = 0.75
# With fewer examples than this, what is known is a mean over rounds of cross-validation: folds of
# few say little.
_LISTED: Final = 100
_ROUNDS: Final = 4
_MANY: Final = 1000
# Beside work on all cores a fit gets a tenth of one: at 19 it got a hundredth, and twenty pictures
# took ten seconds.
_NICENESS: Final = 10
# Whatever its priority, a fit slows what runs on the other threads of its core, by a fifth or so.
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
    """Return the head that is fitted to examples.

    Args:
        features: [N, D].
        labels, numbers: of each example.
        backbone: names what the features are of.
        model: the name of a model that gives them.

    Raises:
        DatasetError: they are too few: two labels need two examples each.
    """
    names = tuple(dict.fromkeys(labels))
    truth = np.array([names.index(label) for label in labels], np.int64)
    if reason := too_few(Counter(labels)):
        raise DatasetError(reason)
    rounds = _ROUNDS if len(truth) < _MANY else 1
    kind = Features.named(backbone)
    scales = kind.scales(features)
    scaled = features / scales
    (head, first), *others = [fit_head(scaled, truth, names, seed=seed) for seed in range(rounds)]
    assert head.weight is not None, "it was fitted"
    known = _knowledge([first, *(choice for _, choice in others)], truth, names, numbers)
    own = replace(
        head, weight=head.weight / scales, features=kind.pool, known=Known.of(features, kind.parts)
    )
    return TaughtHead(own, backbone, model, known.model_dump_json())


def _knowledge(
    rounds: Sequence[Choice], truth: NDArray[np.int64], names: Sequence[str], numbers: Sequence[int]
) -> Knowledge:
    """Return what cross-validations with the same examples, in other folds each time, say of a
    head.
    """
    rows = rounds[0].rows
    scores = np.mean([choice.scores for choice in rounds], axis=0)
    own, answers, each = truth[rows], scores.argmax(axis=1), np.arange(len(rows))
    share = float(np.mean([(choice.scores.argmax(axis=1) == own).mean() for choice in rounds]))
    low, high = interval(share * _COUNTED * len(rows), _COUNTED * len(rows))
    pairs = zip(own.tolist(), answers.tolist(), strict=True)
    wrong = Counter((label, answer) for label, answer in pairs if label != answer)
    of_label, held_out, right = (
        np.bincount(each, minlength=len(names)) for each in (truth, own, own[own == answers])
    )
    needy = (of_label < _FEW) | (2 * right < held_out)
    likely = scores[each, own]
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
                label=names[own[row]],
                likely=names[answers[row]],
                score=float(scores[row].max()),
            )
            for row in doubtful[:_LISTED]
        ],
        needs_more=[name for name, needs in zip(names, needy, strict=True) if needs],
        fitted_to=len(truth),
        fitted_at=datetime.now(UTC),
    )


class Clock(NamedTuple):
    """What the time is, in seconds, how much of it this process computed, and a pause."""

    now: Callable[[], float] = time.monotonic
    computed: Callable[[], float] = time.process_time
    sleep: Callable[[float], None] = time.sleep


CLOCK: Final = Clock()


def fit_changed(
    examples: Examples, share: float = 1.0, linger: float = 0.0, clock: Clock = CLOCK
) -> None:
    """Fit each head whose examples have changed since it was fitted, until there is none.

    Heads take turns, the smallest first.

    Where its examples are too few, it has no fit; where memory is, the one before stays.

    Args:
        share: of a processor's time that all fits together take; there is a rest after each of
        them.
        linger: seconds after the last fit in which changes are waited for: a process takes longer
        to start than to fit.
    """
    rests_until = 0.0
    ends = 0.0
    fitted_at: dict[int, float] = {}
    while True:
        stale = [head for head in examples.heads().values() if head.fitted_revision < head.revision]
        if not stale and clock.now() >= ends:
            return
        if not stale or clock.now() < rests_until:
            clock.sleep(_LOOK_SECONDS)
            continue
        # A head that changes all the time leaves the others their turns.
        head = min(
            stale,
            key=lambda each: (fitted_at.get(each.id, 0.0), sum(examples.state(each)[0].values())),
        )
        begun = clock.computed()
        _fit(examples, head)
        fitted_at[head.id] = clock.now()
        rests_until = clock.now() + (clock.computed() - begun) * (1 / share - 1)
        ends = max(clock.now() + linger, rests_until)


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
