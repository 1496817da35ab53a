"""Heads: what turns the features that a backbone gives of an image into scores of labels. No torch
is needed.

A head is a value. A checkpoint has its own; the labels of a request make another of the features of
their texts, by a checkpoint with a text tower (Radford et al. 2021, CLIP,
https://arxiv.org/abs/2103.00020; Zhai et al. 2023, SigLIP, https://arxiv.org/abs/2303.15343). All
are scored here.
"""

import csv
import json
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from model.config import NetworkConfig
from model.errors import InputError
from model.outputs import (
    CLASS_SPECIFIC,
    RIVALS,
    EmbeddingRequest,
    Linear,
    Method,
    Outputs,
    Pooling,
    RequestedOutputs,
    require_classes,
)

Floats = NDArray[np.float32]

# That of transformers' pipeline `zero-shot-image-classification`.
DEFAULT_TEMPLATE: Final = "This is a photo of {}."

# Of a label, a text or a template.
MAX_CHARACTERS: Final = 256

# Texts of one request: labels times templates.
MAX_TEXTS: Final = 1000

# Characters that JSON takes at most for one of a label.
_WRITTEN: Final = 12

# Commas that a quoted name has at most, on average.
_COMMAS: Final = 32

# Characters that no text holds: controls, also of direction, halves of a surrogate pair, and what
# was not UTF-8.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffd]")

# Categories of characters that are not seen alone.
_UNSEEN: Final = {"Cf", "Mn", "Zs"}

# Share of the pictures like its examples that a taught head does not call far from them.
LEVEL: Final = 0.95

# Examples whose mean distance counts; on CIFAR-10's classes three did as well as five, and better
# than one.
_NEAREST: Final = 3

# Examples that a head keeps: to compare a picture with them takes less than a millisecond.
MOST_KNOWN: Final = 2000

# Cosine from which on features of equal length are of one picture: batches of other sizes round
# them differently.
_EQUAL: Final = 1 - 1e-6

# Features that are compared with all others at once.
_BLOCK: Final = 256

# What is divided by at least: all logits, or all scores, may be equal.
_TINY: Final = 1e-30

# Classes from which on the spread of a picture's logits tells how much speaks for one of them.
_MANY: Final = 50

# Share of the evidence that is left where a head abstains: below `LITTLE`, whatever it was.
_ABSTAINED: Final = 0.1

# Standard deviations above the mean logit at which nothing, and all, speaks for a class.
_ABSENT: Final = 1.5
_PRESENT: Final = 4.0


class Form(BaseModel):
    """How scores fall off from the best class on; by default as in a softmax.

    Where g is how many temperatures a class's logit lies below the best, its score is as exp(-(g
    S^crowding)^power), and S is the sum of exp(-g) over all classes: 1 where the best one is far
    from others. The order of classes stays.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    power: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    crowding: Annotated[float, Field(ge=-3, le=3)] = 0.0

    def falls(self, scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the negative logarithm of what the scores are as, [B, K], of logits divided by the
        temperature.
        """
        below: NDArray[np.float64] = scaled.max(axis=-1, keepdims=True) - scaled
        if self != SOFTMAX:
            below = (
                below * np.exp(-below).sum(axis=-1, keepdims=True) ** self.crowding
            ) ** self.power
        return below


SOFTMAX: Final = Form()


class Best(NamedTuple):
    """The best classes of a batch.

    Attributes:
        scores: float32 [B, k], highest first.
        indices: int64 [B, k], the classes that the scores belong to.
        finite: bool [B], whether all scores of the image are finite.
    """

    scores: Floats
    indices: NDArray[np.int64]
    finite: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """The examples that a head was fitted to, and how far from them a picture is of none of its
    labels.

    The distance is the mean of one less the cosine to each of the nearest examples: deep nearest
    neighbours (Sun et al. 2022, https://arxiv.org/abs/2204.06507). Of features of several parts it
    is the mean of the parts' cosines: a part with long vectors would decide alone. The limit is a
    conformal threshold: for pictures like the examples, a share of `LEVEL` or more is nearer.

    Attributes:
        examples: float32 [M, D] of float16 values, divided by their norms; some of them where there
        are very many.
        limit: the distance above which a picture is far.
        parts: of the features, D / `parts` values each.
    """

    examples: Floats
    limit: float
    parts: int = 1

    @classmethod
    def of(cls, features: Floats, parts: int = 1) -> Self:
        """Return what is known by features [N, D]: the limit is by the distance of each from the
        others.
        """
        rows = np.linspace(0, len(features) - 1, min(len(features), MOST_KNOWN)).astype(np.int64)
        examples = _of_unit_parts(features[rows], parts)
        examples = examples[first_equal(examples) == np.arange(len(rows))]  # a copy is no neighbour
        distances = _distances(examples, examples, alone=False)
        rank = min(len(examples), math.ceil(round((len(examples) + 1) * LEVEL, 6)))
        return cls(
            examples.astype(np.float16).astype(np.float32),
            float(np.sort(distances)[rank - 1]),
            parts,
        )

    def far(self, features: Floats) -> NDArray[np.bool_]:
        """Return whether pictures are far from all examples, bool [B], by their features [B, D]."""
        return self.distances(features) > self.limit

    def distances(self, features: Floats) -> Floats:
        """Return the distance of pictures from the nearest examples, float32 [B], by their features
        [B, D].
        """
        return _distances(_of_unit_parts(features, self.parts), self.examples)


def _of_unit_parts(features: Floats, parts: int) -> Floats:
    """Return features [N, D] of length 1 whose parts are equally long."""
    by_part = features.reshape(len(features), parts, -1)
    return normalized(normalized(by_part).reshape(len(features), -1))


def _distances(features: Floats, examples: Floats, *, alone: bool = True) -> Floats:
    """Return the distances of features from examples, float32 [B]; of each from the others, if it
    is among them.
    """
    cosines = features @ examples.T
    if not alone:
        np.fill_diagonal(cosines, -1)
    nearest = min(_NEAREST, len(examples) - (not alone))
    distances: Floats = 1 - np.partition(cosines, -nearest, axis=1)[:, -nearest:].mean(axis=1)
    return distances


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A classifier of features.

    Attributes:
        labels: of its classes.
        independent: whether each class has a sigmoid of its own, instead of a share of one softmax.
        temperature: logits are divided by it.
        form: of the scores, unless these are independent.
        weight, bias: float32 [C, D] and [C]; None where the backbone's own pass gives the logits.
        normalized: whether features are divided by their L2 norm first: logits are scaled cosines.
        features: which embedding of an image it reads, D values.
        label_sets: gives the sets of labels of logits [B, C], where the head is calibrated and they
            are asked for; see `model.calibration.LabelSets`.
        known: the examples of a taught head, which abstains from a picture that is far from all of
        them.
        thresholds: float32 [C], the least score of each class that answers predict; None: 0.
    """

    labels: tuple[str, ...]
    independent: bool
    temperature: float = 1.0
    form: Form = SOFTMAX
    weight: Floats | None = None
    bias: Floats | float = 0.0
    normalized: bool = False
    features: Pooling = "head"
    label_sets: Callable[[Floats], list[NDArray[np.int64]]] | None = None
    known: Known | None = None
    thresholds: Floats | None = None

    def logits(self, features: Floats) -> Floats:
        """Return the logits of features [B, D]: float32 [B, C]."""
        assert self.weight is not None, "the backbone's pass gives them"
        logits: Floats = (
            normalized(features) if self.normalized else features
        ) @ self.weight.T + np.float32(self.bias)
        return logits

    @property
    def cost(self) -> int:
        """Return the number of multiplications that scoring one picture's features takes."""
        weights = 0 if self.weight is None else self.weight.size
        return weights + (0 if self.known is None else self.known.examples.size)

    @property
    def linear(self) -> Linear:
        """Return what gives the logits of features."""
        assert self.weight is not None, "the backbone's pass gives them"
        return Linear(
            self.weight, np.asarray(self.bias, np.float32), self.normalized, self.features
        )

    def scores(self, logits: Floats) -> Floats:
        """Return the score of each class, float32 [B, C], 0...1, from logits [B, C]; not finite
        where these are not.
        """
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            exact = (logits / np.float32(self.temperature)).astype(np.float64)
            if self.independent:
                return (1 / (1 + np.exp(-exact))).astype(np.float32)
            powers = np.exp(-self.form.falls(exact))
            shares: Floats = (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)
            return shares

    def best(self, logits: Floats, top_k: int) -> Best:
        """Return the `top_k` best classes of logits [B, C].

        Logits are ranked, and not scores: of saturated sigmoids several are 1. Of equal ones the
        first is best.
        """
        scores, chosen = (
            self.scores(logits),
            np.broadcast_to(np.arange(logits.shape[1]), logits.shape),
        )
        if top_k < logits.shape[1]:  # a fraction of the time of sorting a thousand classes
            ranked = np.where(np.isnan(logits), -np.inf, logits)
            least = -np.partition(-ranked, top_k - 1, axis=1)[:, top_k - 1 : top_k]
            above, equal = ranked > least, ranked == least
            room = top_k - above.sum(axis=1, keepdims=True)
            chosen = np.nonzero(above | (equal & (equal.cumsum(axis=1) <= room)))[1].reshape(
                -1, top_k
            )
        order = np.argsort(-np.take_along_axis(logits, chosen, axis=1), axis=1, kind="stable")
        indices = np.take_along_axis(chosen, order, axis=1)
        finite = np.asarray(np.isfinite(scores).all(axis=-1))
        return Best(np.take_along_axis(scores, indices, axis=1), indices, finite)

    def abstains(self, logits: Floats, features: Floats | None = None) -> NDArray[np.bool_]:
        """Return whether none of the labels is given of each image, bool [B].

        Args:
            logits: [B, C].
            features: that a taught head reads, [B, D].
        """
        abstains = np.zeros(len(logits), bool)
        if self.label_sets is not None:
            abstains |= [not len(each) for each in self.label_sets(logits)]
        if self.thresholds is not None:
            abstains |= ~(self.scores(logits) >= self.thresholds).any(axis=1)
        if self.known is not None and features is not None:
            abstains |= self.known.far(features)
        return abstains

    def evidence(
        self, logits: Floats, classes: NDArray[np.int64], abstains: NDArray[np.bool_] | None = None
    ) -> tuple[Floats, Floats]:
        """Return the score of one class of each image, and how much speaks for it on a scale common
        to its classes.

        If scores are independent of each other, the evidence is the score. Else, among 50 classes
        and more, it is how far the class's logit lies above the mean of all logits: 0 at 1.5 of
        their standard deviations, and 1 at 4. Fewer classes have no spread to measure by. There it
        is that distance relative to the best class's, squared, or the class's score relative to the
        best one's if that is more; times the best score, so that it is 1 only if the score is. It
        does not depend on a constant that is added to all logits.

        Little speaks for any class of an image of which the head abstains.

        Args:
            logits: [B, C].
            classes: int64 [B].
            abstains: bool [B], see `abstains`; None: of none.

        Returns:
            float32 [B], 0...1, twice.
        """
        score, evidence = self._evidence(logits, classes)
        if abstains is not None:
            evidence = np.where(abstains, np.float32(_ABSTAINED) * evidence, evidence)
        return score, evidence

    def _evidence(self, logits: Floats, classes: NDArray[np.int64]) -> tuple[Floats, Floats]:
        scores, places = self.scores(logits), np.arange(len(logits))
        score = scores[places, classes]
        if self.independent:
            return score, score
        exact = logits.astype(np.float64)
        best, mean = exact.max(axis=1), exact.mean(axis=1)
        above = np.maximum(exact[places, classes] - mean, 0)
        if logits.shape[1] >= _MANY:
            spread = (above / np.maximum(exact.std(axis=1), _TINY) - _ABSENT) / (_PRESENT - _ABSENT)
            return score, np.clip(spread, 0, 1).astype(np.float32)
        above /= np.maximum(best - mean, _TINY)
        highest = scores.max(axis=1)
        relative = score / np.maximum(highest, np.float32(_TINY))
        return score, np.clip(
            highest * np.maximum(np.square(above).astype(np.float32), relative), 0, 1
        )

    def target(self, features: Floats, method: Method, label: int | None) -> tuple[int, Floats]:
        """Return a class, None being the best one of features [D], and what its map begins with,
        float32 [D].

        By `gae` that is the class's weight; by `relevance` what its margin rises with: its weight
        less the mean of its rivals'. Relevance knows no scale.
        """
        assert self.weight is not None, "the backbone's pass begins with its own"
        [logits] = self.logits(features[np.newaxis])
        if label is None:
            label = int(self.best(logits[np.newaxis], 1).indices[0, 0])
        if method == "gae":
            return label, self.weight[label]
        ranked = np.argsort(-logits, kind="stable")
        rivals = self.weight[ranked[ranked != label][:RIVALS]]
        margin: Floats = (
            self.weight[label] - rivals.mean(axis=0) if len(rivals) else self.weight[label]
        )
        return label, margin / max(float(abs(self.weight).max()), 1e-12)


@dataclass(frozen=True, slots=True)
class ZeroShot:
    """How a checkpoint with a text tower compares images with labels.

    Attributes:
        scale, bias: of the logits.
        independent: whether scores are sigmoids, instead of one softmax.
        templates: texts in which `{}` stands for the label; the features of several are averaged.
    """

    scale: float
    bias: float
    independent: bool
    templates: tuple[str, ...]

    def prompts(self, labels: Sequence[str]) -> list[str]:
        """Return the texts of labels, those of one label together."""
        return [template.replace("{}", label) for label in labels for template in self.templates]

    def head(self, labels: Sequence[str], texts: Floats) -> Head:
        """Return the head of labels, from the features of their `prompts`, [labels templates, D]."""
        features = normalized(
            normalized(texts).reshape(-1, len(self.templates), texts.shape[1]).mean(axis=1)
        )
        weight = np.float32(self.scale) * features
        return Head(tuple(labels), self.independent, weight=weight, bias=self.bias, normalized=True)


def normalized(vectors: Floats) -> Floats:
    """Return vectors [..., D] divided by their L2 norms."""
    divided: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return divided


def first_equal(features: Floats, since: int = 0) -> NDArray[np.int64]:
    """Return the number of the first that each feature equals, but for rounding: its own, or an
    earlier one.

    Args:
        features: [N, D].
        since: the first that is asked for; int64 [N - since] is returned.
    """
    exact, blocks = features.astype(np.float64), range(since, len(features), _BLOCK)
    found = [equal(exact[block : block + _BLOCK], exact).argmax(axis=1) for block in blocks]
    return np.concatenate([np.zeros(0, np.int64), *found])


def equal(features: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which features [N, D] equal which others [M, D], but for rounding: bool [N, M]."""
    squares = np.add.outer(np.square(features).sum(axis=1), np.square(others).sum(axis=1))
    are_equal: NDArray[np.bool_] = 2 * features @ others.T >= _EQUAL * squares
    return are_equal


def of_image(requested: RequestedOutputs, head: Head | None) -> RequestedOutputs:
    """Return what the engine computes of an image that a head of the caller's scores; None is one
    without maps.
    """
    asked, more = requested.map, tuple[RequestedOutputs, ...]()
    if asked is not None and asked.method in CLASS_SPECIFIC:
        asked = None if head is None else replace(asked, by=head.linear)
    read = EmbeddingRequest("head" if head is None else head.features)
    wanted = requested.embedding
    if wanted is not None and wanted.pool == "head":  # what the head reads is what this head reads
        wanted = replace(wanted, pool=read.pool)
    if wanted not in (None, read):
        more = (RequestedOutputs(1, embedding=wanted),)
    return RequestedOutputs(1, asked, embedding=read, head=requested.head, more=more)


def compared(outputs: Outputs, head: Head, requested: RequestedOutputs) -> Outputs:
    """Return what is requested of an image by a head of labels.

    Args:
        outputs: of what `of_image` returns.
    """
    assert outputs.embedding is not None
    features = outputs.embedding[np.newaxis]
    logits = head.logits(features)
    best, found = head.best(logits, requested.top_k), outputs.map
    abstains = head.abstains(logits, features)
    if found is not None and found.request.class_index is not None:
        classes = np.array([found.request.class_index])
        [score], [evidence] = (each.tolist() for each in head.evidence(logits, classes, abstains))
        found = replace(found, score=score, evidence=evidence, abstained=bool(abstains[0]))
    return Outputs(
        best.scores[0],
        best.indices[0],
        found,
        logits[0] if requested.logits else None,
        (outputs.more or (outputs,))[0].embedding if requested.embedding else None,
        outputs.finite and bool(best.finite[0]),
        far=head.known is not None and bool(abstains[0]),
    )


def labels_of_request(
    text: object, zero_shot: ZeroShot | None, config: NetworkConfig
) -> tuple[str, ...]:
    """Return the labels that a caller gives in place of the model's classes; none for None.

    Raises:
        InputError: as `parse_labels`; the model has no classes and no labels are given, or it has
        no text tower.
    """
    if text is None:
        if zero_shot is not None and not config.num_classes:
            raise InputError(
                "labels",
                "labels: the model has none: send labels=cat,dog, or start it with VIT_LABELS",
            )
        require_classes(config)
        return ()
    if zero_shot is None:
        raise InputError(
            "labels",
            "labels: the model has classes of its own, and no text tower to compare others with",
        )
    if not isinstance(text, str):
        raise InputError("labels", "labels: expected a text of names, or of a JSON array")
    return parse_labels(text, most=max(1, MAX_TEXTS // len(zero_shot.templates)))


def with_labels(config: NetworkConfig, labels: Sequence[str]) -> NetworkConfig:
    """Return an architecture as it is for a request with labels: a head is there, with as many
    classes.
    """
    return config.model_copy(update={"num_classes": len(labels)}) if labels else config


def is_list(text: str) -> bool:
    """Return whether a setting holds labels, as `parse_labels` reads them, and not the name of a
    file or preset.
    """
    return "," in text or text.startswith("[")


def parse_labels(text: str, name: str = "labels", *, most: int = MAX_TEXTS) -> tuple[str, ...]:
    """Return the labels in a comma-separated list, with quotes as in CSV, or in a JSON array.

    Raises:
        InputError: there are none or more than `most`, one is empty, too long or not printable, or
        the list is broken.
    """
    if len(text) > most * (
        _WRITTEN * MAX_CHARACTERS + len('"",')
    ):  # before it is cut into millions of pieces
        raise InputError(
            name, f"{name}: {len(text)} characters, more than {most} names of {MAX_CHARACTERS} take"
        )
    commas = text.count(",")
    if commas > most * (_COMMAS if '"' in text else 2):
        raise InputError(name, f"{name}: {commas} commas are between more than {most} names")
    try:
        if text.lstrip().startswith("["):
            values = json.loads(text)
        else:
            values = next(csv.reader([text.strip()], skipinitialspace=True, strict=True), [])
    except (ValueError, RecursionError, csv.Error):
        raise InputError(
            name, f'{name}: expected names like cat,dog,"a red car", or a JSON array of them'
        ) from None
    return checked_texts(values, name, most)


def checked_texts(values: Sequence[object], name: str, most: int) -> tuple[str, ...]:
    """Return texts without the spaces around them; raises `InputError` as `parse_labels`."""
    texts = [value.strip() if isinstance(value, str) else "" for value in values]
    if not 1 <= len(texts) <= most:
        raise InputError(name, f"{name}: there are {len(texts)}, expected 1 to {most}")
    for number, each in enumerate(texts, start=1):
        if (
            len(each) > MAX_CHARACTERS
            or _CONTROL.search(each)
            or _UNSEEN.issuperset(map(unicodedata.category, each))
        ):
            raise InputError(
                name,
                f"{name}: {each!r:.50}, number {number}: expected 1 to {MAX_CHARACTERS} characters that print",
            )
    return tuple(texts)


def checked_label(text: str) -> str:
    """Return a label of an example in one form of Unicode, without spaces around it; raises
    `InputError`.
    """
    [label] = checked_texts([unicodedata.normalize("NFC", text)], "label", 1)
    return label
