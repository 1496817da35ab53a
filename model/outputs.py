"""The data types of a prediction's input and output; they need no torch, so that every process can
use them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, ViTConfig
from model.errors import InputError

# One attention head by number, or all of them combined.
Head = int | Literal["mean", "max"]

# A way to make a map: `cls` is the attention row itself, `model.explanation.methods` has the
# others.
Method = Literal["relevance", "cls", "rollout", "gae"]

# All of them, the default first.
METHODS: Final[tuple[Method, ...]] = get_args(Method)

# Methods whose map is of a class.
CLASS_SPECIFIC: Final[frozenset[Method]] = frozenset({"relevance", "gae"})

# Evidence below which a drawing says in words that little speaks for its class, and from which on
# that much does.
LITTLE: Final = 0.2
MUCH: Final = 0.6

# How many other classes relevance compares a class with; a model of fewer classes has fewer.
RIVALS: Final = 10

# Classes to answer with where the caller does not say how many.
DEFAULT_TOP_K: Final = 5

# Most classes of which one request may have maps.
MAX_CLASSES: Final = 8

# How an image's tokens become its embedding.  `head`, what the head reads; `cls`, the CLS token;
# `mean`, the mean of the patch tokens; all after the final norm. `transfer`, what classifiers of
# other labels read: see `model.network.transfer`.
Pooling = Literal["head", "cls", "mean", "transfer"]

# All of them, the default first.
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)

# The last blocks that transfer features are read from; a network of fewer blocks has fewer.
TRANSFER_BLOCKS: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A linear classifier that a request brings; its fields are those of `model.heads.Head`."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    normalized: bool
    features: Pooling = "head"


@dataclass(frozen=True, slots=True)
class MapRequest:
    """A request for one map.

    Attributes:
        class_index: the class whose map it is, with a class-specific method; None is the best
        class.
        layer: 0 ... depth-1 with `cls`, None with every other method; see `row`.
        head: 0 ... heads-1, or how all heads are combined, with `cls`.
        by: with a class-specific method, what scores the classes in place of the model's head, by
        its embedding.
    """

    method: Method
    class_index: int | None = None
    layer: int | None = None
    head: Head | None = None
    by: Linear | None = None

    @classmethod
    def row(cls, layer: int, head: Head = "mean") -> Self:
        """Return a request for the attention row of a layer."""
        return cls("cls", layer=layer, head=head)

    @property
    def needs_pass(self) -> bool:
        """Return whether the map needs a pass of its own, and does not come out of the
        classification's.
        """
        return self.method != "cls" and not self.of_best_class

    @property
    def of_best_class(self) -> bool:
        """Return whether it is the relevance of the best class, which the classification's pass can
        give.
        """
        return self.method == "relevance" and self.class_index is None and self.by is None


def parse_maps(
    config: NetworkConfig,
    labels: Sequence[str],
    *,
    method: str | None = None,
    classes: str | None = None,
    layer: int | None = None,
    head: str | None = None,
) -> list[MapRequest]:
    """Return the requests for a caller's map, or for a map of each class; None stands for a
    parameter not given.

    Without a method it is `cls` with a layer or head, else the default.

    Args:
        config, labels: of the model.
        classes: see `parse_classes`.

    Raises:
        InputError: the model has no such class, layer, head or method, or one does not apply to the
        other.
    """
    if not isinstance(config, ViTConfig):
        raise InputError(
            "attention", f"{config.kind} has no attention maps: they are for Vision Transformers"
        )
    of_row = [name for name, value in (("layer", layer), ("head", head)) if value is not None]
    methods = methods_of(config)
    implied: Method = "cls" if of_row else methods[0]
    name = implied if method is None else method
    if name in CLASS_SPECIFIC or classes is not None:
        require_classes(config)
    if name not in methods:
        raise InputError("method", f"method {name!r:.50}: expected one of {', '.join(methods)}")
    strangers = [] if name == "cls" else of_row
    if classes is not None and name not in CLASS_SPECIFIC:
        strangers = ["class", *strangers]
    if strangers:
        raise InputError(strangers[0], f"{strangers[0]} does not apply to method {name!r}")
    if name == "cls":
        return [MapRequest.row(parse_layer(layer, config.depth), parse_head(head, config.heads))]
    return [
        MapRequest(name, index)
        for index in ([None] if classes is None else parse_classes(classes, labels))
    ]


def require_classes(config: NetworkConfig) -> None:
    """Raise InputError where a model has no classification head, and what it has instead."""
    if not config.num_classes:
        raise InputError(
            "model",
            "the model has no classification head: it gives embeddings (POST /embed, vitserve embed) and attention "
            f"maps ({', '.join(methods_of(config))}), and no labels",
        )


def methods_of(config: NetworkConfig) -> tuple[Method, ...]:
    """Return the methods of an architecture, its default first: relevance goes back through
    pre-norm blocks alone.

    Without classes there are maps of the attention alone; a library's network has none.
    """
    if not isinstance(config, ViTConfig):
        return ()
    if not config.num_classes:
        return tuple(method for method in METHODS if method not in CLASS_SPECIFIC)
    if config.norm_order != "pre":
        return tuple(
            sorted(
                set(METHODS) - {"relevance"},
                key=lambda method: (method != "gae", METHODS.index(method)),
            )
        )
    return METHODS


def parse_layer(layer: int | None, depth: int) -> int:
    """Return a layer's number from 0; None is the last, negatives count from the end.

    Raises:
        InputError: a model of `depth` layers has no such layer.
    """
    if layer is None:
        return depth - 1
    if not -depth <= layer < depth:
        raise InputError("layer", f"layer {layer}: the model has layers {-depth} ... {depth - 1}")
    return layer % depth


def parse_head(head: str | None, heads: int) -> Head:
    """Return the way to combine heads (None is `mean`), or one head's number.

    Raises:
        InputError: a model of `heads` heads has no such head.
    """
    if head is None or head == "mean":
        return "mean"
    if head == "max":
        return "max"
    if not head.isascii() or not head.isdecimal() or len(head) > 4 or int(head) >= heads:
        raise InputError("head", f"head {head[:20]!r}: expected mean, max, or 0 ... {heads - 1}")
    return int(head)


def parse_classes(text: str, labels: Sequence[str]) -> list[int]:
    """Return the indices of classes that are named in a comma-separated list.

    An integer is an index. Anything else is a label, in any case, or one of its names: `tabby` of
    `tabby, tabby cat`.

    Raises:
        InputError: a name is of no class or of several, an index is too high, or there are too many
        classes.
    """
    by_label, by_name, longest = _indices(tuple(labels))
    parts = [part.strip() for part in text.split(",")]
    indices: list[int] = []
    while parts:
        # A label may contain commas: take as many parts as make a label.
        taken = next(
            (
                n
                for n in range(min(len(parts), longest), 1, -1)
                if ", ".join(parts[:n]).casefold() in by_label
            ),
            1,
        )
        name, parts = ", ".join(parts[:taken]), parts[taken:]
        if name.isascii() and name.isdecimal() and len(name) < 10:
            matches = [int(name)] if int(name) < len(labels) else []
        else:
            matches = by_label.get(name.casefold()) or by_name.get(name.casefold()) or []
        if len(matches) != 1:
            which = (
                f"is ambiguous: {', '.join(map(str, matches[:5]))} are called that"
                if matches
                else "is unknown"
            )
            raise InputError(
                "class",
                f"class {name[:50]!r} {which}; expected a label or an index below {len(labels)}",
            )
        indices.append(matches[0])
        if len(indices) > MAX_CLASSES:
            raise InputError("class", f"class: more than {MAX_CLASSES} classes")
    return indices


@lru_cache(maxsize=4)
def _indices(labels: tuple[str, ...]) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
    """Return the classes of each label and of each name in a label, in any case, and the most names
    in a label.
    """
    by_label: dict[str, list[int]] = {}
    by_name: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        names = dict.fromkeys(name.strip().casefold() for name in label.split(","))
        by_label.setdefault(", ".join(names), []).append(index)
        for name in names:
            by_name.setdefault(name, []).append(index)
    return by_label, by_name, 1 + max((label.count(",") for label in labels), default=0)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for an image's embedding.

    Attributes:
        normalize: whether it is divided by its L2 norm.
    """

    pool: Pooling = "head"
    normalize: bool = False


TRANSFER: Final = EmbeddingRequest("transfer")


def parse_embedding(
    config: NetworkConfig, pool: object = "head", normalize: object = False
) -> EmbeddingRequest:
    """Return the embedding that a caller asks for.

    Raises:
        InputError: there is no such pool, or the model has no CLS token; or `normalize` is not a
        bool.
    """
    if pool not in POOLINGS:
        raise InputError("pool", f"pool {pool!r:.50}: expected one of {', '.join(POOLINGS)}")
    if pool == "transfer":
        pool = transfer_pool(config)
    if pool != "head" and not isinstance(config, ViTConfig):
        raise InputError(
            "pool", f"pool {pool!r}: {config.kind} gives what its head reads alone; expected head"
        )
    if pool == "cls" and isinstance(config, ViTConfig) and not config.class_token:
        raise InputError("pool", "pool 'cls': the model has no CLS token; expected head or mean")
    if not isinstance(normalize, bool):
        raise InputError("normalize", f"normalize {normalize!r:.50}: expected true or false")
    return EmbeddingRequest(pool, normalize)


def transfer_pool(config: NetworkConfig) -> Pooling:
    """Return the embedding that new classifiers read: a network of another library has no blocks to
    read.
    """
    return "transfer" if isinstance(config, ViTConfig) else "head"


def embedding_parts(config: NetworkConfig, pool: Pooling) -> int:
    """Return of how many vectors of equal length an embedding is made; see
    `model.network.transfer`.
    """
    if pool != "transfer" or not isinstance(config, ViTConfig):
        return 1
    return embedding_width(config, pool) // config.width


def embedding_width(config: NetworkConfig, pool: Pooling = "head") -> int:
    """Return the number of values of an embedding.

    That is the width of a token, of two if the head reads two, of a projection, or of all transfer
    features.
    """
    if not isinstance(config, ViTConfig):
        return config.width
    if pool == "transfer":
        return (min(TRANSFER_BLOCKS, config.depth) + config.class_token) * config.width
    if pool != "head":
        return config.width
    return config.projection_width or (
        2 * config.width if config.pool == "cls_mean" else config.width
    )


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """The map of one image.

    Attributes:
        request: the request; with a class-specific method, its class is filled in.
        values: float32 [grid rows, grid columns], summing to 1: what the method found, whatever the
        evidence.
        kept_mass: share of the attention, or of what the method finds, that fell on patches; the
            rest went to the prefix tokens.
        score: of the class, with a class-specific method.
        evidence: how much speaks for the class, 0 ... 1, with a class-specific method; see
            `model.heads.Head.evidence`. A drawing fades with it.
        abstained: whether the head abstains of the image, with a class-specific method.
    """

    request: MapRequest
    values: NDArray[np.float32]
    kept_mass: float
    score: float | None = None
    evidence: float | None = None
    abstained: bool = False


@dataclass(frozen=True, slots=True)
class RequestedOutputs:
    """What a caller asks of one image, from the route to the kernel.

    Attributes:
        top_k: how many classes, 1 ... num_classes.
        map: which map, if any.
        logits: whether to return the logits of all classes.
        embedding: which embedding, if any.
        labels: texts that the image is compared with instead of the model's classes; `model.heads`
            computes their scores from the embedding, so that none of them reaches an engine.
        label_set: whether to return the set of labels, of a model that has a coverage.
        head: which of the backbone's heads scores the image: a name of `Predictor.heads`, or the
        backbone's own.
        more: what is asked of the same image by further heads, in the same pass.
    """

    top_k: int
    map: MapRequest | None = None
    logits: bool = False
    embedding: EmbeddingRequest | None = None
    labels: tuple[str, ...] = ()
    label_set: bool = False
    head: str = ""
    more: "tuple[RequestedOutputs, ...]" = ()

    @property
    def is_plain(self) -> bool:
        """Return whether the best classes of the backbone's own head are all that is asked for."""
        return not (
            self.map or self.logits or self.embedding or self.label_set or self.head or self.more
        )

    @property
    def each(self) -> "tuple[RequestedOutputs, ...]":
        """Return what each head is asked for, the first one first."""
        return (self, *self.more)

    @property
    def needs_pass(self) -> bool:
        """Return whether an output is requested that does not come out of the classification's
        pass.
        """
        return any(each.map is not None and each.map.needs_pass for each in self.each)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What one image gets, from the kernel to the answer; None where it was not requested.

    Attributes:
        scores: float32 [top_k], highest first.
        indices: int64 [top_k], the classes that the scores belong to.
        logits: float32 [num_classes], before the temperature.
        embedding: float32 [D], `embedding_width` of the request.
        finite: whether all scores of the image are finite; the other values mean nothing where they
        are not.
        label_set: int64 [size], the labels that hold the right one with the model's coverage, best
            first; none: the model abstains. See `model.calibration`.
        more: what further heads give of the image, in the order of the request.
        far: whether the image is far from all examples of a taught head, which abstains then.
        least: float32 [top_k], the least score with which each of the classes is predicted; None:
        0.
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
    least: NDArray[np.float32] | None = None

    def predicted(self, min_score: float | None = None) -> NDArray[np.bool_]:
        """Return whether each class has the score that its head, and the caller, ask for at least:
        bool [top_k].
        """
        if self.least is None and min_score is None:  # of most images
            return np.ones(len(self.scores), bool)
        least = 0.0 if self.least is None else self.least
        return self.scores >= np.maximum(least, np.float32(min_score or 0))

    def abstained_by(
        self, min_score: float | None = None
    ) -> Literal["coverage", "distance", "min_score"] | None:
        """Return why no label is given of the image, or None: its distance, its set of labels, or
        its scores.
        """
        if self.far:
            return "distance"
        if self.label_set is not None and not len(self.label_set):
            return "coverage"
        return None if self.predicted(min_score).any() else "min_score"

    @property
    def abstains(self) -> bool:
        """Return whether no label is given of the image, by its head alone."""
        return self.abstained_by() is not None
