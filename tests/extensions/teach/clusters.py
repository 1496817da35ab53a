"""Examples whose features form a cluster for each label."""

import functools

import numpy as np
from numpy.typing import NDArray

from model.extensions.taught.taught_heads import TaughtHead
from service.extensions.teach.examples import Examples
from service.extensions.teach.fit import taught_head
from vitserve.head_documents import Knowledge

LABELS = ("cat", "dog", "cow")


def pictures(
    count: int, *, seed: int = 0, spread: float = 0.4
) -> tuple[NDArray[np.float32], list[str]]:
    """Return features of `count` pictures for each label, and their labels."""
    generator = np.random.default_rng(seed)
    labels = [label for label in LABELS for _ in range(count)]
    centres = np.repeat(3 * np.eye(3, 24), count, axis=0)
    return (centres + spread * generator.normal(size=centres.shape)).astype(np.float32), labels


@functools.cache
def taught(count: int = 10) -> tuple[TaughtHead, Knowledge]:
    """Return a head fitted to `count` pictures for each label, and its statistics."""
    features, labels = pictures(count)
    head = taught_head(features, labels, range(1, len(labels) + 1), "b", "deit")
    return head, Knowledge.model_validate_json(head.statistics)


def teach(store: Examples, count: int = 4, seed: int = 0) -> None:
    features, labels = pictures(count, seed=seed)
    for label in LABELS:
        places = [place for place, each in enumerate(labels) if each == label]
        store.add("pets", label, features[places], "", ("b", "deit"))
