"""The span of a batch: made where the batch was, with the ids that its answers name, and links to its requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")

from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from service.engine.messages import BatchReport
from service.tracing.spans import traceparent_of
from tests.service.fakes import on_a_loop, running
from tests.service.tracing.recorder import CALLER, Recorder, attributes, ids

OTHER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    # The batch is exported if one of its requests is, whatever the sampler says of traces that begin here.
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    return Recorder()


@on_a_loop
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
async def test_answers_name_the_span_of_their_batch_which_links_to_their_requests(
    remote: bool, recorder: Recorder
) -> None:
    async with running(remote=remote) as rig:
        busy = await rig.keep_busy()
        asked = [rig.ask_soon(red, traceparent=given) for red, given in enumerate([CALLER, None, OTHER, CALLER])]
        await rig.until_queued(4)
        rig.predictor.gate.set()
        alone, *results = await asyncio.gather(busy, *asked)
        while len(rig.reports) < 2:
            await asyncio.sleep(0)
        tracer = recorder.telemetry.batch_tracer()
        for report in rig.reports:
            tracer.observe(report)
    assert alone.batch_traceparent is None  # nobody has asked for a span
    span = recorder.one("batch")
    assert {result.batch_traceparent for result in results} == {ids(span)}
    assert ids(span).split("-")[1] not in {CALLER.split("-")[1], OTHER.split("-")[1]}
    assert sorted(traceparent_of(link.context) for link in span.links) == sorted([CALLER, OTHER])
    assert span.parent is None
    assert attributes(span) == {
        "vitserve.device": "cpu",
        "vitserve.batch.size": 4,
        "vitserve.batch.padding": 0,
        "vitserve.batch.release": "full",
    }


def test_a_batch_ends_when_it_is_reported_and_lasts_as_long_as_it_computed(recorder: Recorder) -> None:
    tracer = recorder.telemetry.batch_tracer()
    tracer._wall_clock = lambda: 5_000_000_000
    tracer.observe(report(traceparent=OTHER, links=(CALLER,)))
    span = recorder.one("batch")
    assert (span.start_time, span.end_time) == (3_500_000_000, 5_000_000_000)
    assert ids(span) == OTHER


def test_a_batch_without_a_sampled_request_has_no_span(recorder: Recorder) -> None:
    recorder.telemetry.batch_tracer().observe(report())
    assert recorder.names == []


def report(**changes: Any) -> BatchReport:
    return BatchReport("cpu", 1, 0, "idle", 1.5, **changes)


def test_the_sampler_of_the_environment_is_that_of_requests(recorder: Recorder) -> None:
    assert recorder.tracer.tracer.sampler is ALWAYS_OFF  # type: ignore[attr-defined]  # the SDK's
