"""What is said of a loaded model comes from its checkpoint, its predictor and the settings."""

from __future__ import annotations

import dataclasses

import pytest

from service.engine.loading import load_predictor
from service.settings import load_settings


@pytest.mark.parametrize(("given", "name"), [({}, "vit-cifar10"), ({"model_name": "cats"}, "cats")])
def test_every_fact_is_that_of_the_checkpoint_or_of_the_predictor(given: dict[str, str], name: str) -> None:
    predictor, info = load_predictor(load_settings({"device": "cpu", "backend": "torch", "max_batch": "3", **given}))
    checkpoint = predictor.checkpoint
    facts = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    assert facts.pop("name") == name
    for own in ("source", "revision", "format", "architecture", "config", "preprocess", "labels"):
        assert facts.pop(own) == getattr(checkpoint, own)
    assert facts.pop("backend").startswith("torch ")
    assert facts.pop("parameters") > 1_000_000
    assert facts == {
        "temperature": checkpoint.temperature,
        "multi_label": False,
        "device": "cpu",
        "dtype": predictor.dtype,
        "max_batch": 3,
        "gpu_uuid": None,
    }
