"""The data types of a prediction's input and output; they need no torch, so that every process can use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from model.errors import InputError

Head = int | Literal["mean", "max"]
"""One attention head by number, or all of them combined."""

Fusion = Literal["mean", "max", "min"]
"""How rollout combines the heads of a block."""

FUSIONS: Final[tuple[Fusion, ...]] = ("mean", "max", "min")

METHODS: Final = ("relevance", "cls", "rollout", "gae", "legrad")
"""Ways to make a map, the default first: `cls` is the attention row itself, `model.explanation` has the others."""

CLASS_SPECIFIC: Final = frozenset({"relevance", "gae", "legrad"})
"""Those of the methods whose map is of one class."""

MAX_CLASSES: Final = 8
"""Most classes of which one request may want maps."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """The parameters of the method `rollout`.

    Requests and maps carry them in the name of their method, so that images with the same ones are computed together.

    Attributes:
        fusion: how the heads of a block are combined.
        discard: share of an image's weights in each block, at least 0 and below 1, that are set to zero, the smallest
            first.
    """

    fusion: Fusion = "mean"
    discard: float = 0.0

    @property
    def method(self) -> str:
        """Return the name of the method with these parameters: `rollout`, or for example `rollout:max:0.9`."""
        return "rollout" if self == Rollout() else f"rollout:{self.fusion}:{self.discard!r}"

    @classmethod
    def of(cls, method: str) -> Rollout | None:
        """Return the parameters in the name of a method, or None if it is the name of another method."""
        name, _, rest = method.partition(":")
        fusion, _, discard = rest.partition(":")
        if name != "rollout":
            return None
        return cls(cast(Fusion, fusion), float(discard)) if rest else cls()


def parse_rollout(fusion: str | None, discard: float | None) -> Rollout:
    """Return the parameters of a rollout; None is the default.

    Raises:
        InputError: there is no such fusion, or the share is not at least 0 and below 1.
    """
    if fusion is not None and fusion not in FUSIONS:
        raise InputError("fusion", f"fusion {fusion[:20]!r}: expected one of {', '.join(FUSIONS)}")
    if discard is not None and not 0 <= discard < 1:
        raise InputError("discard", f"discard {discard}: expected at least 0, and less than 1")
    return Rollout(fusion or "mean", discard or 0.0)


@dataclass(frozen=True, slots=True)
class MapRequest:
    """A request for one map.

    Attributes:
        layer: 0 ... depth-1; None with every method but `cls`.
        head: 0 ... heads-1, or how all heads are combined; None with every method but `cls`.
        method: one of `METHODS`, or the name of a rollout with its parameters (see `Rollout`).
        class_index: the class whose map is wanted, with the methods that are class-specific; None is the best class.
    """

    layer: int | None
    head: Head | None = "mean"
    method: str = "cls"
    class_index: int | None = None

    @classmethod
    def explained(cls, method: str, class_index: int | None = None) -> MapRequest:
        """Return a request for a map by another method than `cls`."""
        return cls(None, None, method, class_index)

    @property
    def needs_pass(self) -> bool:
        """Return whether the map needs a pass of its own, and does not come out of the classification's."""
        return self.method != "cls" and not self.of_best_class

    @property
    def of_best_class(self) -> bool:
        """Return whether it is the relevance of the best class, which the classification's pass can give."""
        return self.method == "relevance" and self.class_index is None


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

    An integer is an index. Anything else is a label, in any case, or one of its names: `tabby` of `tabby, tabby cat`.

    Raises:
        InputError: a name is of no class or of several, an index is too high, or there are too many classes.
    """
    by_label, by_name, longest = _indices(tuple(labels))
    parts = [part.strip() for part in text.split(",")]
    found: list[int] = []
    while parts:
        # A label may contain commas itself: as many parts as make one.
        taken = next(
            (n for n in range(min(len(parts), longest), 1, -1) if ", ".join(parts[:n]).casefold() in by_label), 1
        )
        name, parts = ", ".join(parts[:taken]), parts[taken:]
        if name.isascii() and name.isdecimal() and len(name) < 10:
            matches = [int(name)] if int(name) < len(labels) else []
        else:
            matches = by_label.get(name.casefold()) or by_name.get(name.casefold()) or []
        if len(matches) != 1:
            which = f"is ambiguous: {', '.join(map(str, matches[:5]))} are called that" if matches else "is unknown"
            raise InputError("class", f"class {name[:50]!r} {which}; expected a label or an index below {len(labels)}")
        found.append(matches[0])
        if len(found) > MAX_CLASSES:
            raise InputError("class", f"class: more than {MAX_CLASSES} classes")
    return found


@lru_cache(maxsize=4)
def _indices(labels: tuple[str, ...]) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
    """Return the classes of each label and of each name in a label, without regard to case, and most names in one."""
    by_label: dict[str, list[int]] = {}
    by_name: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        names = dict.fromkeys(name.strip().casefold() for name in label.split(","))
        by_label.setdefault(", ".join(names), []).append(index)
        for name in names:
            by_name.setdefault(name, []).append(index)
    return by_label, by_name, 1 + max((label.count(",") for label in labels), default=0)


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """The map of one image; its first two and last two attributes are those of the request, its class known.

    Attributes:
        values: float32 [grid rows, grid columns], summing to 1.
        kept_mass: share of the attention, or of what the method finds, that fell on patches; the rest went to the
            prefix tokens.
    """

    layer: int | None
    head: Head | None
    values: NDArray[np.float32]
    kept_mass: float
    method: str = "cls"
    class_index: int | None = None


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A picture that the device decodes and resizes.

    Attributes:
        data: a JPEG that `model.images.device_jpeg.device_picture` took for one that a device decodes.
        size: (width, height) in pixels, as it is stored.
        orientation: Exif orientation, 1...8, by which it is turned upright.
    """

    data: bytes
    size: tuple[int, int]
    orientation: int


Picture = NDArray[np.uint8] | EncodedPicture
"""An image of a batch: uint8 [H, W, C], the model's input size, or one that the device decodes to that."""


@dataclass(frozen=True, slots=True)
class BatchPrediction:
    """The top-k classes and attention maps of one batch, in the order of the images.

    Attributes:
        scores: float32 [B, k], highest first.
        indices: int64 [B, k], the classes that the scores belong to.
        finite: bool [B]; False where a score is not finite, so that the image has no prediction.
        maps: B entries, None where no map was requested.
        logits: float32 [B, classes], before the temperature; None where they were not asked for.
        decoded: uint8 [H, W, C] of each encoded picture by its place, as the device decoded it; None for one that the
            device could not decode, whose other values mean nothing.
    """

    scores: NDArray[np.float32]
    indices: NDArray[np.int64]
    finite: NDArray[np.bool_]
    maps: list[AttentionMap | None]
    logits: NDArray[np.float32] | None = None
    decoded: Mapping[int, NDArray[np.uint8] | None] = field(default_factory=dict)
