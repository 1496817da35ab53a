"""Known examples of a taught head: which pictures are far from them, and which are equal.

No torch is needed.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from model.features import Floats, normalized

# Share of pictures like the examples that a taught head does not call far.
NEAR_SHARE: Final = 0.95

# Number of nearest examples of a label whose mean distance is used.
_NEAREST: Final = 3

# Examples that a head keeps. Comparing a picture with them takes less than a millisecond.
MAX_KNOWN_EXAMPLES: Final = 2000

# Two features of equal length belong to one picture from this cosine on, because batches of
# different sizes round differently.
_EQUAL: Final = 1 - 1e-6

# Number of features that are compared with all others at once.
_BLOCK: Final = 256

# Weights of the CLS tokens of the last three blocks, and of the last block's patches. The token of
# the block before the last tells new classes apart best; see docs/decisions/transfer-features.md.
_WEIGHTS: Final = (0.5, 1.0, 0.25, 0.5)


def part_weights(parts: int) -> tuple[float, ...]:
    """Return the weights of the parts of features; they are equal unless there are four parts."""
    return _WEIGHTS if parts == len(_WEIGHTS) else (1.0,) * parts


@dataclass(frozen=True, slots=True, eq=False)
class KnownExamples:
    """The examples that a head was fitted to, and the distance from which a picture is unlike them.

    The distance is one minus the mean cosine to the nearest examples of the nearest label: deep
    nearest neighbours (Sun et al. 2022, https://arxiv.org/abs/2204.06507). Features of several
    parts use the weighted mean of the parts' cosines, because a part with long vectors would decide
    alone.

    Attributes:
        examples: float32 [M, D] of float16 values, divided by their norms; a sample if there are
            more than `MAX_KNOWN_EXAMPLES`.
        labels: int32 [M], the label of each example by number, in runs.
        limit: the distance above which a picture is far.
        weights: weights of the parts of the features, which are equally long.
    """

    examples: Floats
    labels: NDArray[np.int32]
    limit: float
    weights: tuple[float, ...] = (1.0,)

    @classmethod
    def of(
        cls, features: Floats, labels: NDArray[np.int64], weights: tuple[float, ...] = (1.0,)
    ) -> Self:
        """Build from features [N, D] and their labels [N].

        The limit is the quantile `NEAR_SHARE` of the distances of examples to the others. On other
        pictures it kept that share, and the conformal rank, which is the farthest of few examples,
        kept 98 %. The only example of a label does not count: it would be far from all others.
        """
        rows = _sample(labels)
        examples = _with_unit_parts(features[rows], weights)
        # A copy of an example is not a neighbour.
        is_first = first_equal_indices(examples) == np.arange(len(rows))
        examples = examples[is_first]
        kept_labels = labels[rows][is_first].astype(np.int32)
        cosines = examples @ examples.T
        np.fill_diagonal(cosines, -np.inf)
        distances = _nearest_distances(cosines, kept_labels)
        has_others = np.bincount(kept_labels)[kept_labels] > 1
        if has_others.any():
            distances = distances[has_others]
        return cls(
            examples.astype(np.float16).astype(np.float32),
            kept_labels,
            float(np.quantile(distances, NEAR_SHARE)),
            weights,
        )

    def are_far(self, features: Floats) -> NDArray[np.bool_]:
        """Return whether the pictures of features [B, D] are far from all examples, bool [B]."""
        return self.distances(features) > self.limit

    def distances(self, features: Floats) -> Floats:
        """Return the distances of features [B, D] from the nearest examples, float32 [B]."""
        cosines = _with_unit_parts(features, self.weights) @ self.examples.T
        return _nearest_distances(cosines, self.labels)


def _sample(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows of at most `MAX_KNOWN_EXAMPLES` examples by label, equally many of each.

    A rare label keeps all its examples: without them, the head would abstain from its pictures.
    """
    order = np.random.default_rng(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    index_in_label = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
    rows = np.sort(order[np.argsort(index_in_label, kind="stable")[:MAX_KNOWN_EXAMPLES]])
    return rows[np.argsort(labels[rows], kind="stable")]


def _with_unit_parts(features: Floats, weights: tuple[float, ...]) -> Floats:
    """Return features [N, D] of length 1 whose products are weighted means of parts' cosines."""
    by_part = normalized(features.reshape(len(features), len(weights), -1))
    lengths = np.sqrt(np.array(weights, np.float32))[:, np.newaxis]
    return normalized((by_part * lengths).reshape(len(features), -1))


def _nearest_distances(cosines: Floats, labels: NDArray[np.int32]) -> Floats:
    """Return the mean distances to the nearest examples of the nearest label, float32 [B].

    Args:
        cosines: cosines with M examples, [B, M]; minus infinity excludes an example.
        labels: labels of the examples, [M], in runs.
    """
    is_start = np.diff(labels, prepend=-1) != 0
    starts = np.flatnonzero(is_start)
    run = np.cumsum(is_start) - 1
    sums = np.zeros((len(cosines), len(starts)), np.float32)
    counts = np.zeros(sums.shape, np.float32)
    for _ in range(_NEAREST):
        best = np.maximum.reduceat(cosines, starts, axis=1)
        is_example = best > -np.inf
        sums += np.where(is_example, best, 0)
        counts += is_example
        # Equal cosines are as good as copies of one example, and count once.
        cosines = np.where(cosines == best[:, run], -np.inf, cosines)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), -1)
    distances: Floats = 1 - means.max(axis=1)
    return distances


def first_equal_indices(features: Floats, since: int = 0) -> NDArray[np.int64]:
    """Return the index of the first feature that each feature equals, up to rounding.

    A feature without an earlier equal has its own index.

    Args:
        features: [N, D].
        since: index of the first feature to look up; int64 [N - since] is returned.
    """
    exact = features.astype(np.float64)
    firsts = [np.zeros(0, np.int64)]
    for start in range(since, len(features), _BLOCK):
        firsts.append(equal_pairs(exact[start : start + _BLOCK], exact).argmax(axis=1))
    return np.concatenate(firsts)


def equal_pairs(features: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which features [N, D] equal which others [M, D] up to rounding, bool [N, M]."""
    squares = np.add.outer(np.square(features).sum(axis=1), np.square(others).sum(axis=1))
    are_equal: NDArray[np.bool_] = 2 * features @ others.T >= _EQUAL * squares
    return are_equal
