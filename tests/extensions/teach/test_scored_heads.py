"""Taught heads over HTTP: scoring, and failures of a single head."""

import threading
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from model.extensions.taught.known_examples import KnownExamples
from model.heads import Head
from service.models.served_heads import ServedHead
from tests.service.fakes import model_info, on_a_loop
from tests.service.web.apps import App, app, service_in

WIDTH = 8
"""Width of the fake engine's embedding."""


class NotingKnown(KnownExamples):
    """Known examples that record the threads of their comparisons."""

    threads: ClassVar[list[int]] = []

    def are_far(self, features: NDArray[np.float32]) -> NDArray[np.bool_]:
        self.threads.append(threading.get_ident())
        return super().are_far(features)


def head(examples: int = 2, width: int = WIDTH, scale: float = 1.0) -> Head:
    features = np.ones((examples, width), np.float32)
    known = NotingKnown(features, np.zeros(examples, np.int32), 10.0)
    weight = np.float32(scale) * np.eye(2, width, dtype=np.float32)
    return Head(
        ("a", "b"), independent=False, weight=weight, bias=np.zeros(2, np.float32), known=known
    )


def with_heads(**heads: Head) -> App:
    """Return an application whose only model has these heads."""
    service = app()
    service.engine.info = model_info(backbone="backbone")
    added = {name: ServedHead(name, head, "", "") for name, head in heads.items()}
    service_in(service).models.heads = added
    return service


@on_a_loop
@pytest.mark.parametrize(
    ("query", "count"),
    [("model=large", 1), ("model=large,small", 2), ("model=small", 0), ("model=small,tiny", 2)],
)
async def test_large_heads_are_scored_on_a_thread(query: str, count: int) -> None:
    NotingKnown.threads.clear()
    service = with_heads(large=head(40_000), small=head(), tiny=head())
    assert (await service.classify(query=query)).status == 200
    others = [each for each in NotingKnown.threads if each != threading.get_ident()]
    assert len(others) == count


@on_a_loop
@pytest.mark.parametrize(
    ("broken", "code"),
    [(head(width=5), "internal_error"), (head(scale=np.nan), "inference_failed")],
    ids=["width", "nan"],
)
async def test_a_failing_head_spares_the_others(broken: Head, code: str) -> None:
    service = with_heads(broken=broken, sound=head())
    answer = await service.classify(query="model=*")
    assert answer.status == 200
    models = answer.json["models"]
    assert models["broken"]["error"]["code"] == code
    assert [len(models[name]["predictions"]) for name in ("fake", "sound")] == [5, 2]
    assert (await service.classify(query="model=broken")).code == code


@on_a_loop
async def test_many_heads_are_one_job_of_the_lane() -> None:
    NotingKnown.threads.clear()
    heads = {f"head{number}": head(2_000) for number in range(20)}
    service = with_heads(**heads)
    answer = await service.classify(query="model=*")
    assert len(answer.json["models"]) == 21
    assert len(set(NotingKnown.threads)) == 1
    assert threading.get_ident() not in NotingKnown.threads


@on_a_loop
async def test_equal_features_are_sent_once() -> None:
    service = with_heads(one=head(), two=head(), other=replace(head(), features="cls"))
    answer = await service.classify(query="model=*")
    assert [len(answer.json["models"][name]["predictions"]) for name in ("one", "two")] == [2, 2]
    assert len(service.engine.timeouts) == 3, "classes, features of two heads, other features"
