"""Zero-shot classification: an image's embedding is compared with features of texts; it needs no torch.

Radford et al. 2021 (CLIP), https://arxiv.org/abs/2103.00020; Zhai et al. 2023 (SigLIP), https://arxiv.org/abs/2303.15343.
A label becomes texts by the templates, a text becomes a feature by the checkpoint's text tower. The logit of a label is
the cosine of the image's embedding and the label's feature, times a scale, plus a bias.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.errors import InputError
from model.outputs import Outputs

DEFAULT_TEMPLATE: Final = "This is a photo of {}."
"""That of transformers' pipeline `zero-shot-image-classification`."""

MAX_CHARACTERS: Final = 256
"""Of a label, a text or a template."""

MAX_TEXTS: Final = 1000
"""Texts of one request: labels times templates."""

MAX_TEMPLATES: Final = 200


@dataclass(frozen=True, slots=True)
class ZeroShot:
    """What labels of a request are compared by.

    Attributes:
        scale, bias: of the logits.
        templates: texts in which `{}` stands for the label; the features of several are averaged.
    """

    scale: float
    bias: float
    templates: tuple[str, ...]

    def prompts(self, labels: Sequence[str]) -> list[str]:
        """Return the texts of labels, those of one label together."""
        return [template.replace("{}", label) for label in labels for template in self.templates]

    def label_features(self, texts: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a feature of norm 1 for each label, [labels, D], from those of `prompts`, [labels templates, D]."""
        return _normalized(_normalized(texts).reshape(-1, len(self.templates), texts.shape[1]).mean(axis=1))

    def compare(
        self, outputs: Outputs, features: NDArray[np.float32], *, top_k: int, independent: bool, logits: bool
    ) -> Outputs:
        """Return an image's outputs with the scores of other labels than the model's own.

        Args:
            outputs: of an image, with its embedding.
            features: `label_features` of the labels.
            independent: whether scores are sigmoids, instead of one softmax.
            logits: whether to return all logits.
        """
        assert outputs.embedding is not None
        values = (features @ _normalized(outputs.embedding) * np.float32(self.scale) + np.float32(self.bias)).astype(
            "f4"
        )
        with np.errstate(over="ignore"):
            exponentials = np.exp(-values if independent else values - values.max())
        scores = 1 / (1 + exponentials) if independent else exponentials / exponentials.sum()
        best = np.argsort(-scores, kind="stable")[:top_k]
        return replace(outputs, scores=scores[best], indices=best, logits=values if logits else None)


def _normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    normalized: NDArray[np.float32] = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return normalized


def parse_labels(text: str, name: str = "labels", *, most: int = MAX_TEXTS) -> tuple[str, ...]:
    """Return the labels in a comma-separated list, with quotes as in CSV, or in a JSON array.

    Raises:
        InputError: there are none or more than `most`, one is empty, too long or not printable, or the list is broken.
    """
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else _separated(text)
    except (ValueError, RecursionError, csv.Error):
        raise InputError(name, f'{name}: expected names like cat,dog,"a red car", or a JSON array of them') from None
    return checked_texts(values, name, most)


def checked_texts(values: Sequence[object], name: str, most: int) -> tuple[str, ...]:
    """Return texts without the spaces around them; raises `InputError` as `parse_labels`."""
    texts = [value.strip() if isinstance(value, str) else "" for value in values]
    if not 1 <= len(texts) <= most:
        raise InputError(name, f"{name}: there are {len(texts)}, expected 1 to {most}")
    for number, each in enumerate(texts, start=1):
        if not each or len(each) > MAX_CHARACTERS or not each.isprintable():
            raise InputError(name, f"{name}: {each!r:.50}, number {number}: expected 1 to {MAX_CHARACTERS} characters")
    return tuple(texts)


def _separated(text: str) -> list[str]:
    rows = list(csv.reader([text], skipinitialspace=True, strict=True))
    return rows[0] if rows else []
