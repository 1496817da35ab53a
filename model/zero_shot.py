"""Zero-shot classification: an image's embedding is compared with features of texts; it needs no torch.

Radford et al. 2021 (CLIP), https://arxiv.org/abs/2103.00020; Zhai et al. 2023 (SigLIP), https://arxiv.org/abs/2303.15343.
A label becomes texts by the templates, a text becomes a feature by the checkpoint's text tower. The logit of a label is
the cosine of the image's embedding and the label's feature, times a scale, plus a bias.
"""

from __future__ import annotations

import csv
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig
from model.errors import InputError
from model.outputs import (
    RIVALS,
    AttentionMap,
    EmbeddingRequest,
    MapRequest,
    Outputs,
    RequestedOutputs,
    faded,
    require_classes,
)

DEFAULT_TEMPLATE: Final = "This is a photo of {}."
"""That of transformers' pipeline `zero-shot-image-classification`."""

MAX_CHARACTERS: Final = 256
"""Of a label, a text or a template."""

MAX_TEXTS: Final = 1000
"""Texts of one request: labels times templates."""

MAX_TEMPLATES: Final = 200

_WRITTEN: Final = 12
"""Characters that JSON takes at most for one of a label."""

_COMMAS: Final = 32
"""Commas that a quoted name has at most, on average."""

_CONTROL: Final = {"Cc", "Cs"}
"""Categories of characters that no text holds: controls, and halves of a surrogate pair."""


@dataclass(frozen=True, slots=True)
class ZeroShot:
    """What labels of a request are compared by.

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

    def label_features(self, texts: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a feature of norm 1 for each label, [labels, D], from those of `prompts`, [labels templates, D]."""
        return normalized(normalized(texts).reshape(-1, len(self.templates), texts.shape[1]).mean(axis=1))

    def compare(self, outputs: Outputs, features: NDArray[np.float32], requested: RequestedOutputs) -> Outputs:
        """Return what is requested of an image: its outputs with the scores of labels that are not the model's own.

        Args:
            outputs: of the request that `of_image` returns.
            features: `label_features` of the labels.
        """
        values = self._logits(outputs, features)
        with np.errstate(over="ignore"):
            exponentials = np.exp(-values if self.independent else values - values.max())
        scores: NDArray[np.float32] = 1 / (1 + exponentials) if self.independent else exponentials / exponentials.sum()
        best = np.argsort(-scores, kind="stable")[: requested.top_k]
        return replace(
            outputs,
            scores=scores[best],
            indices=best,
            logits=values if requested.logits else None,
            embedding=None if requested.embedding is None else outputs.embedding,
        )

    def map_of_best(self, outputs: Outputs, features: NDArray[np.float32]) -> MapRequest:
        """Return the request for the relevance of the best label, which is compared with its rivals as a class is.

        What a label's margin rises with is its feature less the mean of its rivals'; relevance knows no scale.

        Args:
            outputs, features: as for `compare`.
        """
        best, *rivals = features[np.argsort(-self._logits(outputs, features), kind="stable")[: 1 + RIVALS]]
        direction = best - np.mean(rivals, axis=0) if rivals else best
        return MapRequest("relevance", direction=direction / max(float(abs(features).max()), 1e-12))

    def with_map(self, compared: Outputs, found: AttentionMap) -> Outputs:
        """Return what `compare` gave with a map of `map_of_best`, faded as that of a class."""
        score = float(compared.scores[0])
        evidence = score if self.independent else 1.0  # as `Postprocess.best_evidence`
        request = MapRequest("relevance", int(compared.indices[0]))
        [values] = faded(found.values[np.newaxis], np.array([evidence], np.float32))
        return replace(compared, map=AttentionMap(request, values, found.kept_mass, score, evidence))

    def _logits(self, outputs: Outputs, features: NDArray[np.float32]) -> Any:
        """Return the logits of labels, float32 [labels]."""
        assert outputs.embedding is not None
        return np.float32(self.scale) * (features @ normalized(outputs.embedding)) + np.float32(self.bias)


def of_image(requested: RequestedOutputs) -> RequestedOutputs:
    """Return what the engine computes of an image that is compared with labels."""
    embedding = requested.embedding or EmbeddingRequest()
    of_labels = requested.map is not None and requested.map.of_best_class
    of_image = None if of_labels else requested.map
    return replace(requested, top_k=1, map=of_image, logits=False, embedding=embedding, labels=())


def normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors [..., D] divided by their L2 norms."""
    divided: NDArray[np.float32] = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return divided


def labels_of_request(text: object, zero_shot: ZeroShot | None, config: NetworkConfig) -> tuple[str, ...]:
    """Return the labels that a caller gives in place of the model's classes; none for None.

    Raises:
        InputError: as `parse_labels`; the model has no classes and no labels are given, or it has no text tower.
    """
    if text is None:
        if zero_shot is not None and not config.num_classes:
            raise InputError("labels", "labels: the model has none: send labels=cat,dog, or start it with VIT_LABELS")
        require_classes(config)
        return ()
    if zero_shot is None:
        raise InputError("labels", "labels: the model has classes of its own, and no text tower to compare others with")
    if not isinstance(text, str):
        raise InputError("labels", "labels: expected a text of names, or of a JSON array")
    return parse_labels(text, most=max(1, MAX_TEXTS // len(zero_shot.templates)))


def with_labels(config: NetworkConfig, labels: Sequence[str]) -> NetworkConfig:
    """Return an architecture as it is for a request with labels: a head is there, with as many classes."""
    return config.model_copy(update={"num_classes": len(labels)}) if labels else config


def is_list(text: str) -> bool:
    """Return whether a setting holds labels, as `parse_labels` reads them, and not the name of a file or preset."""
    return "," in text or text.startswith("[")


def parse_labels(text: str, name: str = "labels", *, most: int = MAX_TEXTS) -> tuple[str, ...]:
    """Return the labels in a comma-separated list, with quotes as in CSV, or in a JSON array.

    Raises:
        InputError: there are none or more than `most`, one is empty, too long or not printable, or the list is broken.
    """
    if len(text) > most * (_WRITTEN * MAX_CHARACTERS + len('"",')):  # before it is cut into millions of pieces
        raise InputError(name, f"{name}: {len(text)} characters, more than {most} names of {MAX_CHARACTERS} take")
    commas = text.count(",")
    if commas > most * (_COMMAS if '"' in text else 2):
        raise InputError(name, f"{name}: {commas} commas are between more than {most} names")
    try:
        if text.lstrip().startswith("["):
            values = json.loads(text)
        else:
            values = next(csv.reader([text.strip()], skipinitialspace=True, strict=True), [])
    except (ValueError, RecursionError, csv.Error):
        raise InputError(name, f'{name}: expected names like cat,dog,"a red car", or a JSON array of them') from None
    return checked_texts(values, name, most)


def checked_texts(values: Sequence[object], name: str, most: int) -> tuple[str, ...]:
    """Return texts without the spaces around them; raises `InputError` as `parse_labels`."""
    texts = [value.strip() if isinstance(value, str) else "" for value in values]
    if not 1 <= len(texts) <= most:
        raise InputError(name, f"{name}: there are {len(texts)}, expected 1 to {most}")
    for number, each in enumerate(texts, start=1):
        if not 1 <= len(each) <= MAX_CHARACTERS or _CONTROL & set(map(unicodedata.category, each)):
            raise InputError(
                name, f"{name}: {each!r:.50}, number {number}: expected 1 to {MAX_CHARACTERS} characters that print"
            )
    return tuple(texts)
