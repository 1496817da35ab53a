"""Frames: whatever is sent is what arrives, however the stream is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from model.prediction import AttentionMap, MapRequest
from service.cluster.protocol import (
    Cancel,
    Cancelled,
    Decoder,
    Failure,
    Frame,
    FrameError,
    Hello,
    Model,
    Result,
    Status,
    Submit,
    encode,
)
from service.engine.messages import EngineStatus, InferenceResult
from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed, QueueFull
from tests.service.fakes import model_info

IDS = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 2**31 - 1)
SECONDS = st.floats(0, 1e9)
HEADS = st.one_of(st.sampled_from(["mean", "max"]), st.integers(0, 255))


def floats(shape: Any) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.float32, shape, elements=st.floats(0, 1, width=32))


@st.composite
def results(draw: st.DrawFn) -> InferenceResult:
    top_k = draw(st.integers(1, 20))
    found = None
    if draw(st.booleans()):
        grid = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
        found = AttentionMap(draw(st.integers(0, 255)), draw(HEADS), draw(floats(grid)), draw(st.floats(0, 1)))
    indices = draw(arrays.arrays(np.int64, top_k, elements=SMALL))
    return InferenceResult(draw(floats(top_k)), indices, found, draw(SMALL), draw(SECONDS), draw(SECONDS))


FRAMES: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Hello, SMALL, st.binary(max_size=64)),
    st.builds(Submit, IDS, SMALL, SMALL, st.none() | st.builds(MapRequest, st.integers(0, 255), HEADS), SECONDS),
    st.builds(Cancel, IDS),
    st.builds(
        Status,
        st.builds(
            EngineStatus,
            st.text(),
            st.sampled_from(["loading", "ready", "failed", "closed"]),
            st.text(),
            st.text(),
            st.none() | st.lists(SMALL).map(tuple),
            SMALL,
            SMALL,
        ),
    ),
    st.builds(Model, st.builds(model_info, name=st.text(), labels=st.lists(st.text(), min_size=1).map(tuple))),
    st.builds(Result, IDS, results()),
    st.builds(
        Failure,
        IDS,
        st.builds(
            lambda kind, text: kind(text),
            st.sampled_from([InferenceFailed, EngineUnavailable, QueueFull, DeadlineExceeded, Cancelled]),
            st.text(),
        ),
    ),
)


def plain(value: Any) -> Any:
    """Comparable by `==`, types included."""
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tolist())
    if isinstance(value, Exception):
        return (type(value), str(value))
    if dataclasses.is_dataclass(value):
        return (type(value), [plain(getattr(value, field.name)) for field in dataclasses.fields(value)])
    return value


@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(0, 2000), max_size=6))
def test_whatever_is_sent_is_what_arrives_however_the_stream_is_cut(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(map(encode, frames))
    ends = [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = Decoder()
    received: list[Frame] = []
    for start, end in zip([0, *ends], ends, strict=False):
        received += decoder.feed(stream[start:end])
    assert [plain(frame) for frame in received] == [plain(frame) for frame in frames]


@given(st.binary(max_size=200))
def test_other_bytes_are_a_frame_an_error_or_wait_for_more(data: bytes) -> None:
    try:
        list(Decoder().feed(data))
    except FrameError as error:
        assert "\n" not in str(error)[:40]


@pytest.mark.parametrize(
    "data",
    [
        b"\x01\x00\x00\x00\xff",
        b"\x03\x00\x00\x00\x03ab",
        b"\x01\x00\x00\x00\x06",
        b"\x04\x00\x00\x00\x04{}!",
    ],
)
def test_a_kind_or_a_payload_that_does_not_exist_is_an_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(Decoder().feed(data))
