"""A service that takes labels from requests, and its expected scores."""

from typing import Any

import numpy as np
import pytest

from model.heads import ZeroShot
from model.outputs import EmbeddingRequest
from service.settings import load_settings
from tests.service.fakes import expected_embedding, model_info, text_feature
from tests.service.web.apps import App
from tests.service.web.fake_engine import FakeEngine

ZERO_SHOT = ZeroShot(5.0, -1.0, False, ("a photo of {}.", "{} at night"))
LABELS = ("cab", "a bee, high", "egg")
CSV = 'cab, "a bee, high", egg'


def service(**changes: Any) -> App:
    return App(load_settings({**changes}), FakeEngine(model_info(zero_shot=ZERO_SHOT)))


def expected_scores(red: int, independent: bool = False) -> dict[str, float]:
    embedding = expected_embedding(red, EmbeddingRequest())
    texts = np.stack([text_feature(text) for text in ZERO_SHOT.prompts(LABELS)])
    [logits] = ZERO_SHOT.head(LABELS, texts).logits(embedding[np.newaxis])
    scores = 1 / (1 + np.exp(-logits)) if independent else np.exp(logits) / np.exp(logits).sum()
    return dict(zip(LABELS, scores.tolist(), strict=True))


def require_scores(predictions: list[dict[str, Any]], red: int) -> None:
    expected = expected_scores(red)
    assert [each["label"] for each in predictions] == sorted(
        expected, key=lambda label: -expected[label]
    )
    for each in predictions:
        assert each["score"] == pytest.approx(expected[each["label"]], abs=1e-6)
        assert LABELS[each["index"]] == each["label"]
