"""One launch: what each image of a batch gets, and what the log and the report say of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count

import pytest

from model.errors import CheckpointChanged
from service.engine.batching import Entry
from service.engine.messages import InferenceRequest, InferenceResult
from service.engine.streams import launch
from service.errors import EngineUnavailable, InferenceFailed
from tests.service.fakes import (
    BAD,
    FakePredictor,
    expected_indices,
    request_for,
)


def entries(*reds: int) -> list[Entry[InferenceRequest]]:
    return [Entry(request_for(red), arrived=90.0 + row, deadline=200.0) for row, red in enumerate(reds)]


def ticking() -> Callable[[], float]:
    """A clock that is one second later with each look, from 100."""
    return map(float, count(100)).__next__


@pytest.mark.parametrize("error", [RuntimeError, ValueError, MemoryError])
def test_a_batch_that_fails_and_each_image_that_fails_alone_are_logged(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    predictor = FakePredictor(error=error)
    outcomes, report = launch(predictor, entries(1, BAD, 3), "full", ticking())
    assert predictor.launched == [[1, BAD, 3], [1], [BAD], [3]]
    assert [type(outcome) for outcome in outcomes] == [InferenceResult, InferenceFailed, InferenceResult]
    assert report.size == 3
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "a batch of 3 failed, trying its images one by one: it does not compute"),
        (logging.ERROR, "an image failed alone: it does not compute"),
    ]


def test_files_that_changed_under_the_service_are_told_to_who_needs_them() -> None:
    outcomes, _ = launch(FakePredictor(error=CheckpointChanged), entries(1, BAD), "idle", ticking())
    assert [str(outcome) for outcome in outcomes[1:]] == [
        "this output needs the checkpoint's files, which changed since they were loaded"
    ]


def test_a_dead_device_is_named() -> None:
    with pytest.raises(EngineUnavailable, match="the device failed: cuda:3: the model does not run"):
        launch(FakePredictor(device="cuda:3", device_is_dead=True), entries(1), "idle", ticking())


def test_times_are_counted_from_the_launch() -> None:
    predictor = FakePredictor(batch_sizes=(1, 4), device="cuda:3")
    outcomes, report = launch(predictor, entries(1, 2, 3), "delay", ticking())
    assert [(outcome.queue_seconds, outcome.inference_seconds, outcome.batch_size, outcome.outputs.indices.tolist())
            for outcome in outcomes if isinstance(outcome, InferenceResult)] == [
        (10.0, 1.0, 3, expected_indices(1, 3)),
        (9.0, 1.0, 3, expected_indices(2, 3)),
        (8.0, 1.0, 3, expected_indices(3, 3)),
    ]  # fmt: skip
    assert (report.device, report.size, report.padding, report.release) == ("cuda:3", 3, 1, "delay")
    assert report.inference_seconds == 2.0
