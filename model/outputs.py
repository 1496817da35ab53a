"""The request for one image, and the outputs that answer it.

No torch is needed, so that every process can use these types.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, ViTConfig
from model.methods import is_class_specific

# One attention head by number, or all of them combined.
AttentionHead = int | Literal["mean", "max"]

# Captions say "little evidence" below the first value, and "much evidence" from the second on.
LITTLE_EVIDENCE: Final = 0.2
MUCH_EVIDENCE: Final = 0.6

# Number of other classes that relevance compares a class with; fewer if the model has fewer.
RIVALS: Final = 10

# Number of classes in an answer if the caller does not say how many.
DEFAULT_TOP_K: Final = 5

# Up to this number of classes, sorting all of them is faster than finding the highest.
_SORTED_CLASSES: Final = 64

# How an image's tokens become its embedding. `head`: the features that the head reads; `cls`: the
# CLS token; `mean`: the mean of the patch tokens; all after the final norm. `transfer`: the
# features that classifiers of other labels read, see `model.network.transfer`.
Pooling = Literal["head", "cls", "mean", "transfer"]

# All poolings, the default first.
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)

# Number of last blocks that transfer features are read from; fewer if the network has fewer.
TRANSFER_BLOCKS: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A linear classifier that a request brings; for its fields see `model.heads.Head`."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    normalized: bool
    features: Pooling = "head"


@dataclass(frozen=True, slots=True)
class MapRequest:
    """A request for one map.

    Attributes:
        method: name of an explanation method; see `model.methods`.
        class_index: the class of a class-specific map; None is the best class.
        layer: 0 ... depth-1 with `cls`, None with every other method; see `attention_row`.
        attention_head: attention head 0 ... heads-1, or how all are combined, with `cls`.
        classifier: the classifier of a class-specific map, if not one of the backbone's heads.
    """

    method: str
    class_index: int | None = None
    layer: int | None = None
    attention_head: AttentionHead | None = None
    classifier: Linear | None = None

    @classmethod
    def attention_row(cls, layer: int, attention_head: AttentionHead = "mean") -> Self:
        """Return a request for the attention row of a layer."""
        return cls("cls", layer=layer, attention_head=attention_head)

    @property
    def is_class_specific(self) -> bool:
        """Return whether the map is of one class."""
        return is_class_specific(self.method)

    @property
    def needs_pass(self) -> bool:
        """Return whether the map needs a pass besides the classification's."""
        return self.method != "cls" and not self.of_best_class

    @property
    def of_best_class(self) -> bool:
        """Return whether it is the relevance of the best class.

        The classification's pass can compute it.
        """
        return self.method == "relevance" and self.class_index is None and self.classifier is None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for an image's embedding.

    Attributes:
        pool: how tokens become the embedding.
        normalize: whether it is divided by its L2 norm.
    """

    pool: Pooling = "head"
    normalize: bool = False


def transfer_pool(config: NetworkConfig) -> Pooling:
    """Return the embedding that new classifiers read: `head` if blocks cannot be read."""
    return "transfer" if isinstance(config, ViTConfig) else "head"


def embedding_width(config: NetworkConfig, pool: Pooling = "head") -> int:
    """Return the number of values in an embedding.

    That is the width of a token, of two if the head reads two, of a projection, or of all transfer
    features.
    """
    if not isinstance(config, ViTConfig):
        return config.width
    if pool == "transfer" or (pool == "head" and config.pool == "transfer"):
        return (min(TRANSFER_BLOCKS, config.depth) + config.class_token) * config.width
    if pool != "head":
        return config.width
    if config.projection_width:
        return config.projection_width
    return 2 * config.width if config.pool == "cls_mean" else config.width


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """The map of one image.

    Attributes:
        request: the request, with the class filled in for a class-specific method.
        values: float32 [grid rows, grid columns], summing to 1, whatever the evidence.
        kept_mass: share of the attention or relevance that fell on patches; the rest went to the
            prefix tokens.
        score: score of the class, with a class-specific method.
        evidence: evidence for the class, 0 ... 1, with a class-specific method; see
            `model.heads.Head.score_and_evidence`. A drawing fades with it.
        abstained: whether the head abstains, with a class-specific method.
    """

    request: MapRequest
    values: NDArray[np.float32]
    kept_mass: float
    score: float | None = None
    evidence: float | None = None
    abstained: bool = False


@dataclass(frozen=True, slots=True)
class RequestedOutputs:
    """The outputs that a caller requests of one image, from the route to the kernel.

    Attributes:
        top_k: number of classes, 1 ... num_classes.
        map: the requested map, if any.
        logits: whether to return the logits of all classes.
        embedding: the requested embedding, if any.
        labels: texts that the image is compared with instead of the model's classes. Engines do not
            see them, because `model.heads.Head.answer` scores them.
        label_set: whether to return the set of labels, of a model that has a coverage.
        head_name: the head that scores the image: a name of `Predictor.heads`; empty for the
            checkpoint's own.
        more: requests for the same image to other heads, in the same pass.
    """

    top_k: int
    map: MapRequest | None = None
    logits: bool = False
    embedding: EmbeddingRequest | None = None
    labels: tuple[str, ...] = ()
    label_set: bool = False
    head_name: str = ""
    more: "tuple[RequestedOutputs, ...]" = ()

    @property
    def is_plain(self) -> bool:
        """Return whether the best classes of one head are all that is needed."""
        return not (self.map or self.logits or self.embedding or self.label_set or self.more)

    @property
    def head_requests(self) -> "tuple[RequestedOutputs, ...]":
        """Return this request and the requests to other heads."""
        return (self, *self.more)

    @property
    def needs_pass(self) -> bool:
        """Return whether an output needs a pass besides the classification's."""
        return any(
            requested.map is not None and requested.map.needs_pass
            for requested in self.head_requests
        )


class Outputs(NamedTuple):
    """The outputs of one image, from the kernel to the answer; None for outputs not requested.

    Attributes:
        scores: float32 [top_k], highest first.
        indices: int64 [top_k], the classes that the scores belong to.
        map: the map, if requested.
        logits: float32 [num_classes], before the temperature.
        embedding: float32 [D], `embedding_width` of the request.
        finite: whether all scores of the image are finite; if not, the other values mean nothing.
        label_set: int64 [size], the labels that include the right one with the model's coverage,
            best first; if empty, the model abstains. See `model.calibration`.
        more: outputs of other heads, in the order of the request.
        far: whether the image is far from all examples of a taught head, which then abstains.
        thresholds: float32 [top_k], the lowest score at which each class is predicted; None: 0.
        predicted_score: with thresholds, the highest score of all classes that reach theirs, or -1.
    """

    scores: NDArray[np.float32]
    indices: NDArray[np.int64]
    map: AttentionMap | None = None
    logits: NDArray[np.float32] | None = None
    embedding: NDArray[np.float32] | None = None
    finite: bool = True
    label_set: NDArray[np.int64] | None = None
    more: "tuple[Outputs, ...]" = ()
    far: bool = False
    thresholds: NDArray[np.float32] | None = None
    predicted_score: float | None = None

    def are_predicted(self, min_score: float | None = None) -> NDArray[np.bool_]:
        """Return whether each class reaches the thresholds of its head and caller, bool [top_k]."""
        if self.thresholds is None and min_score is None:  # most images
            return np.ones(len(self.scores), bool)
        thresholds = 0.0 if self.thresholds is None else self.thresholds
        return self.scores >= np.maximum(thresholds, np.float32(min_score or 0))

    def reason_to_abstain(
        self, min_score: float | None = None
    ) -> Literal["coverage", "distance", "min_score"] | None:
        """Return why the image gets no label, or None if it gets one, whatever `top_k` is."""
        if self.far:
            return "distance"
        if self.label_set is not None and not len(self.label_set):
            return "coverage"
        highest = self.scores[0] if self.predicted_score is None else self.predicted_score
        return None if highest >= np.float32(min_score or 0) else "min_score"

    @property
    def abstains(self) -> bool:
        """Return whether the head itself gives the image no label."""
        return self.reason_to_abstain() is not None


class BestClasses(NamedTuple):
    """The best classes of a batch.

    Attributes:
        scores: float32 [B, k], highest first.
        indices: int64 [B, k], the classes that the scores belong to.
        finite: bool [B], whether all scores of the image are finite.
    """

    scores: NDArray[np.float32]
    indices: NDArray[np.int64]
    finite: NDArray[np.bool_]


def best_classes(
    logits: NDArray[np.float32], scores: NDArray[np.float32], top_k: int
) -> BestClasses:
    """Return the `top_k` best classes of logits and scores [B, C].

    Classes are ranked by logits, because several saturated sigmoids have a score of 1. Of classes
    with equal logits, the first is best.
    """
    rows = np.arange(len(logits))[:, np.newaxis]
    if logits.shape[1] <= _SORTED_CLASSES:
        indices = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    else:
        chosen = _highest(logits, top_k)
        order = np.argsort(-logits[rows, chosen], axis=1, kind="stable")
        indices = chosen[rows, order]
    finite = np.asarray(np.isfinite(scores).all(axis=-1))
    return BestClasses(scores[rows, indices], indices, finite)


def _highest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the `count` classes with the highest logits [B, C], in class order: int64 [B, count].

    This takes a fraction of the time of sorting a thousand classes.
    """
    if count >= logits.shape[1]:
        return np.broadcast_to(np.arange(logits.shape[1]), logits.shape)
    ranked = np.where(np.isnan(logits), -np.inf, logits)
    lowest = -np.partition(-ranked, count - 1, axis=1)[:, count - 1 : count]
    is_above = ranked > lowest
    is_equal = ranked == lowest
    places_left = count - is_above.sum(axis=1, keepdims=True)
    is_chosen = is_above | (is_equal & (is_equal.cumsum(axis=1) <= places_left))
    return np.nonzero(is_chosen)[1].reshape(-1, count)
