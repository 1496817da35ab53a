"""Launching one batch: every image gets an outcome, and an image that the model fails on fails alone."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from model.errors import VitError
from service.engine.base import ModelRunner
from service.engine.batching import Entry
from service.engine.messages import BatchReport, InferenceRequest, InferenceResult, Release
from service.errors import EngineUnavailable, InferenceFailed, ServiceError

logger = logging.getLogger(__name__)

Outcome = InferenceResult | ServiceError
Waiting = Entry[InferenceRequest]
"""An image in the queue, or taken out of it."""


def launch(
    runner: ModelRunner, batch: Sequence[Waiting], release: Release, clock: Callable[[], float]
) -> tuple[list[Outcome], BatchReport]:
    """Compute a batch, and if that fails, its images one by one.

    Args:
        batch: at least one image, and at most `runner.max_batch`.
        clock: monotonic seconds, the same that the queue reads.

    Returns:
        The outcome of each image, in the batch's order, and the report of the launch.

    Raises:
        EngineUnavailable: the device no longer computes.
    """
    launched = clock()
    try:
        outcomes = _predict(runner, batch, launched, clock)
    except (RuntimeError, ValueError, MemoryError) as error:
        logger.warning("a batch of %d failed, trying its images one by one: %s", len(batch), error)
        outcomes = [_predict_alone(runner, entry, launched, clock) for entry in batch]
    if all(isinstance(outcome, InferenceFailed) for outcome in outcomes):
        # Every image failed. If an empty image fails too, the device is lost, and the engine ends.
        try:
            runner.check()
        except VitError as error:
            raise EngineUnavailable(f"the device failed: {error}") from error
    links = tuple({entry.item.traceparent: None for entry in batch if entry.item.traceparent is not None})
    traceparent = _new_traceparent() if links else None
    if traceparent is not None:
        outcomes = [
            replace(outcome, batch_traceparent=traceparent) if isinstance(outcome, InferenceResult) else outcome
            for outcome in outcomes
        ]
    return outcomes, BatchReport(
        device=runner.device,
        size=len(batch),
        padding=runner.launch_size(len(batch)) - len(batch),
        release=release,
        inference_seconds=clock() - launched,
        traceparent=traceparent,
        links=links,
    )


def _new_traceparent() -> str:
    """Return the context of a new span in a trace of its own, sampled."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def _predict(
    runner: ModelRunner, batch: Sequence[Waiting], launched: float, clock: Callable[[], float]
) -> list[Outcome]:
    requests = [entry.item for entry in batch]
    outputs = runner.predict([each.pixels for each in requests], [each.requested for each in requests])
    seconds = clock() - launched
    return [
        InferenceResult(each, len(batch), launched - entry.arrived, seconds)
        if each.finite
        else InferenceFailed("the model gave no finite score for this image")
        for each, entry in zip(outputs, batch, strict=True)
    ]


def _predict_alone(runner: ModelRunner, entry: Waiting, launched: float, clock: Callable[[], float]) -> Outcome:
    """Compute one image of a batch that failed: only the images that fail alone are at fault."""
    try:
        return _predict(runner, [entry], launched, clock)[0]
    except (RuntimeError, ValueError, MemoryError) as error:
        logger.error("an image failed alone: %s", error)
        return InferenceFailed("the model failed on this image")
