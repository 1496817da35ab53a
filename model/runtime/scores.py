"""Scores of logits in host memory, without torch: softmax or sigmoids, the top-k, and how much speaks for a class."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, ViTConfig
from model.runtime.batches import HostOutputs

Floats = NDArray[np.float32]

_TINY: Final = 1e-30
"""What is divided by at least: all logits, or all scores, may be equal."""


class Scored(Protocol):
    """The part of a checkpoint, or of what is kept of one, that scores depend on."""

    @property
    def config(self) -> NetworkConfig:
        """Return the architecture."""

    @property
    def temperature(self) -> float:
        """Return what logits are divided by."""

    @property
    def multi_label(self) -> bool:
        """Return whether scores are independent sigmoids."""


def has_independent_scores(checkpoint: Scored) -> bool:
    """Return whether each class has a sigmoid of its own instead of a share of one softmax."""
    config = checkpoint.config
    is_compared = isinstance(config, ViTConfig) and config.normalized_head
    return checkpoint.multi_label or (config.num_classes == 1 and not is_compared)


class Scores:
    """Turns logits into the top-k scores, as the checkpoint says.

    Attributes:
        config: the checkpoint's.
    """

    def __init__(self, checkpoint: Scored) -> None:
        self.config = checkpoint.config
        self._temperature = np.float32(checkpoint.temperature)
        self._independent = has_independent_scores(checkpoint)

    def scores(self, logits: Floats) -> Floats:
        """Return the score of each class, float32 [B, K], 0...1, from logits [B, K]; not finite where these are not."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            exact = (logits / self._temperature).astype(np.float64)
            if self._independent:
                return (1 / (1 + np.exp(-exact))).astype(np.float32)
            powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
            shares: Floats = (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)
            return shares

    def best_evidence(self, scores: Floats) -> Floats:
        """Return the evidence of each image's best class, float32 [B], of its score: 1 unless classes are independent.

        Args:
            scores: float32 [B].
        """
        return scores if self._independent else np.ones_like(scores)

    def evidence(self, logits: Floats, classes: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return the score of one class of each image, and how much speaks for it on a scale common to its classes.

        Where scores are independent of each other, the evidence is the score. Else it is how far the class's logit
        lies above the mean of all logits, relative to the best class's, squared; or the class's score relative to the
        best one's where that is more. So of two classes that share the score, each has the whole evidence, even where
        there is no third to be compared with. It does not depend on a constant that is added to all logits.

        Args:
            logits: [B, K].
            classes: int64 [B].

        Returns:
            float32 [B], 0...1, twice: the evidence of the best class is 1 unless scores are independent.
        """
        scores, places = self.scores(logits), np.arange(len(logits))
        score = scores[places, classes]
        if self._independent:
            return score, score
        exact = logits.astype(np.float64)
        best, mean = exact.max(axis=1), exact.mean(axis=1)
        above = np.maximum(exact[places, classes] - mean, 0) / np.maximum(best - mean, _TINY)
        relative = score / np.maximum(scores.max(axis=1), np.float32(_TINY))
        return score, np.clip(np.maximum(np.square(above).astype(np.float32), relative), 0, 1)

    def __call__(self, output: HostOutputs, top_k: int) -> HostOutputs:
        """Return the output of a network with the `top_k` best classes of each image."""
        assert output.logits is not None
        scores = self.scores(output.logits)
        finite = np.asarray(np.isfinite(scores).all(axis=-1))
        indices = _best(output.logits, top_k)
        return output._replace(scores=np.take_along_axis(scores, indices, axis=1), indices=indices, finite=finite)


def _best(logits: Floats, top_k: int) -> NDArray[np.int64]:
    """Return the places of the highest values of each row, highest first, int64 [B, top_k]."""
    if top_k == 1:
        best: NDArray[np.int64] = np.argmax(logits, axis=1, keepdims=True)
        return best
    if top_k < logits.shape[1]:
        chosen = np.sort(np.argpartition(-logits, top_k - 1, axis=1)[:, :top_k], axis=1)
    else:
        chosen = np.broadcast_to(np.arange(logits.shape[1]), logits.shape)
    order = np.argsort(-np.take_along_axis(logits, chosen, axis=1), axis=1, kind="stable")
    return np.take_along_axis(chosen, order, axis=1)
