"""Predictors of the network families, and checks of their maps of relevance."""

from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import Checkpoint
from model.config import PreprocessConfig
from model.explanation.explain import explain
from model.outputs import (
    MapRequest,
)
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise
from tests.model.explanation.random_models import model_of
from tests.model.runtime.predictions import MODES, Predictions, predict

RELEVANCE = MapRequest("relevance")


MIXED = [
    RELEVANCE,
    None,
    MapRequest.attention_row(0, 1),
    RELEVANCE,
    MapRequest.attention_row(1, "max"),
]


SIZES: dict[str, Any] = {"image_size": (48, 56), "depth": 2}


def checkpoint_of(family: str, **changes: Any) -> Checkpoint:
    model = model_of(family, **SIZES, **changes)
    size = model.config.image_size
    preprocess = PreprocessConfig(
        size=size,
        resize="squash",
        resize_size=size,
        interpolation="bicubic",
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
    )
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Checkpoint(
        "test", "test", "vitserve", "vit", model.config, preprocess, tuple("abcde"), tensors
    )


def images_for(predictor: Predictor, count: int = 5) -> np.ndarray:
    return np.random.default_rng(2).integers(
        0, 256, (count, *predictor.config.image_size, 3), dtype=np.uint8
    )


def family_predictor(
    family: str, backend: str = "torch", changes: dict[str, Any] | None = None, **options: Any
) -> Predictor:
    options = {"threads": 1, "max_batch": 8, **options}
    checkpoint = checkpoint_of(family, **(changes or {}))
    return Predictor(
        checkpoint, device="cpu", dtype="float32", compile_mode=MODES[backend], **options
    )


def require_explanation(
    predictor: Predictor, images: np.ndarray, place: int, found: Predictions
) -> None:
    """Compare the image's map with an explanation of its best class alone."""
    pixels = Normalise(predictor.checkpoint.preprocess)(torch.from_numpy(images))
    best = int(found.indices[place, 0])
    checkpoint = predictor.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    expected, kept = explain(checkpoint.build(), pixels[[place]], torch.tensor([best]), RELEVANCE)
    got = found.maps[place]
    assert got.request == MapRequest("relevance", best)
    np.testing.assert_allclose(got.values, expected[0].numpy(), atol=1e-5)
    assert got.kept_mass == pytest.approx(kept.item(), abs=1e-5)
    assert got.score == pytest.approx(float(found.scores[place, 0]))
    assert got.evidence == pytest.approx(got.score), "of few classes"
    assert got.values.max() > 1.5 / got.values.size or got.kept_mass == 0, (
        "a map is even where nothing is found alone"
    )


def require_mixed(predictor: Predictor, rows_of: Predictor) -> None:
    """Check each image's outputs in a batch of all kinds of requests."""
    images = images_for(predictor)
    found = predict(predictor, images, top_k=2, maps=MIXED)
    rows = predict(rows_of, images, top_k=2, maps=[None, None, MIXED[2], None, MIXED[4]])
    np.testing.assert_array_equal(found.indices, rows.indices)
    for place in (0, 3):
        require_explanation(predictor, images, place, found)
    assert found.maps[1] is None
    for place in (2, 4):
        got = found.maps[place]
        wanted = rows.maps[place]
        assert got.request == wanted.request
        np.testing.assert_allclose(got.values, wanted.values, atol=1e-5)
