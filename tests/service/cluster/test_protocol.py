"""Frames: whatever is sent is what arrives, however the stream is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from model.config import ViTConfig
from model.outputs import (
    FUSIONS,
    METHODS,
    POOLINGS,
    AttentionMap,
    EmbeddingRequest,
    Head,
    MapRequest,
    Outputs,
    RequestedOutputs,
)
from model.zero_shot import MAX_CHARACTERS, MAX_TEXTS
from service.cluster.protocol import (
    FAILURES,
    REPLY_LIMIT,
    REQUEST_LIMIT,
    TEXTS_LIMIT,
    Cancel,
    Cancelled,
    Completed,
    EmbedTexts,
    Failed,
    Frame,
    FrameError,
    FrameReader,
    Hello,
    ModelLoaded,
    StatusChanged,
    Submit,
    TextsEmbedded,
    encode,
)
from service.engine.messages import EngineStatus, InferenceResult
from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed, QueueFull
from tests.service.fakes import LIBRARY, model_info

IDS = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 2**31 - 1)
SECONDS = st.floats(0, 1e9)
HEADS: st.SearchStrategy[Head] = st.one_of(st.just("mean"), st.just("max"), st.integers(0, 255))

MAPS = st.builds(
    MapRequest,
    st.sampled_from(METHODS),
    st.none() | SMALL,
    st.none() | st.integers(0, 255),
    st.none() | HEADS,
    st.none() | st.sampled_from(FUSIONS),
    st.none() | st.floats(0, 1),
    st.none() | arrays.arrays(np.float32, 5, elements=st.floats(-1, 1, width=32)),
)
EMBEDDINGS = st.builds(EmbeddingRequest, st.sampled_from(POOLINGS), st.booleans())


def floats(shape: Any) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.float32, shape, elements=st.floats(0, 1, width=32))


@st.composite
def results(draw: st.DrawFn) -> InferenceResult:
    top_k = draw(st.integers(1, 20))
    found = None
    if draw(st.booleans()):
        grid = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
        found = AttentionMap(draw(MAPS), draw(floats(grid)), *(draw(st.floats(0, 1)) for _ in range(3)))
    indices = draw(arrays.arrays(np.int64, top_k, elements=SMALL))
    times = draw(SECONDS), draw(SECONDS)
    logits, embedding = draw(st.none() | floats(20)), draw(st.none() | floats(12))
    label_set = draw(st.none() | arrays.arrays(np.int64, st.integers(0, 9), elements=SMALL))
    outputs = Outputs(draw(floats(top_k)), indices, found, logits, embedding, label_set=label_set)
    return InferenceResult(outputs, draw(SMALL), *times)


FRAMES: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Hello, SMALL, st.binary(max_size=64)),
    st.builds(
        Submit,
        IDS,
        SMALL,
        SECONDS,
        st.builds(RequestedOutputs, SMALL, st.none() | MAPS, st.booleans(), st.none() | EMBEDDINGS),
    ),
    st.builds(Cancel, IDS),
    st.builds(EmbedTexts, IDS, st.lists(st.text(), max_size=9).map(tuple), SECONDS),
    st.builds(TextsEmbedded, IDS, floats((3, 5))),
    st.builds(
        StatusChanged,
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
    st.builds(ModelLoaded, st.builds(model_info, name=st.text(), labels=st.lists(st.text(), min_size=1).map(tuple))),
    st.just(ModelLoaded(model_info(config=LIBRARY))),
    st.builds(Completed, IDS, results()),
    st.builds(
        Failed.of,
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
    if isinstance(value, Failed):
        return (value.id, plain(value.error()))
    if isinstance(value, msgspec.Struct):
        return (type(value), [plain(each) for each in msgspec.structs.astuple(value)])
    if dataclasses.is_dataclass(value):
        return (type(value), [plain(getattr(value, field.name)) for field in dataclasses.fields(value)])
    return value


@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(0, 2000), max_size=6))
def test_whatever_is_sent_is_what_arrives_however_the_stream_is_cut(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(map(encode, frames))
    ends = [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = FrameReader(REPLY_LIMIT)
    received: list[Frame] = []
    for start, end in zip([0, *ends], ends, strict=False):
        received += reader.feed(stream[start:end])
    assert [plain(frame) for frame in received] == [plain(frame) for frame in frames]


def is_refused(data: bytes, limit: int = REPLY_LIMIT) -> bool:
    try:
        list(FrameReader(limit).feed(data))
    except FrameError as error:
        assert "\n" not in str(error)[:40]
        return True
    return False


@given(st.binary(max_size=200))
def test_other_bytes_are_a_frame_an_error_or_wait_for_more(data: bytes) -> None:
    is_refused(data)
    is_refused(len(data).to_bytes(4, "little") + data)


@given(FRAMES, st.data())
def test_a_frame_with_wrong_bytes_is_a_frame_or_an_error(frame: Frame, data: st.DataObject) -> None:
    changed = bytearray(encode(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(4, len(changed) - 1))] = data.draw(st.integers(0, 255))
    is_refused(bytes(changed))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"\x90",
        msgspec.msgpack.encode([99]),
        msgspec.msgpack.encode([3]),
        msgspec.msgpack.encode([3, "one"]),
        msgspec.msgpack.encode([3, 1, 1]),
        msgspec.msgpack.encode([1, -1, bytes(32)]),
        msgspec.msgpack.encode([7, 1, len(FAILURES), "no such error"]),
        msgspec.msgpack.encode([7, 1, 0, "text"]).replace(b"text", b"\xff\xff\xff\xff"),
    ],
    ids=["empty", "no array", "no tag", "kind", "too short", "type", "too long", "negative", "error", "utf-8"],
)
def test_a_kind_or_a_payload_that_does_not_exist_is_an_error(payload: bytes) -> None:
    assert is_refused(len(payload).to_bytes(4, "little") + payload)


@pytest.mark.parametrize("more", [b"", bytes(1000)])
def test_a_frame_that_is_too_long_is_refused_as_soon_as_its_length_is_known(more: bytes) -> None:
    reader = FrameReader(100)
    assert list(reader.feed(b"\xff\xff\xff")) == []
    with pytest.raises(FrameError, match="4294967295 bytes"):
        list(reader.feed(b"\xff" + more))
    for length, refused in ((100, False), (101, True)):
        assert is_refused(length.to_bytes(4, "little") + bytes(50), limit=100) == refused


@pytest.mark.parametrize(
    ("limit", "size"), [(REQUEST_LIMIT, 1024), (REPLY_LIMIT, 268_435_456)], ids=["worker", "engine"]
)
def test_what_a_peer_may_announce_has_a_bound(limit: int, size: int) -> None:
    assert not is_refused(size.to_bytes(4, "little"), limit)
    assert is_refused((size + 1).to_bytes(4, "little"), limit)


@given(FRAMES.filter(lambda frame: isinstance(frame, Hello | Submit | Cancel)))
def test_whatever_a_worker_sends_is_short(frame: Frame) -> None:
    assert not is_refused(encode(frame), REQUEST_LIMIT)


def test_the_texts_of_a_request_fit_into_a_frame() -> None:
    texts = ("\U0001f600" * MAX_CHARACTERS,) * MAX_TEXTS
    assert not is_refused(encode(EmbedTexts(1, texts, 1.0)), TEXTS_LIMIT)


def test_the_widest_direction_of_a_map_fits_into_a_frame() -> None:
    bounds = ViTConfig.model_json_schema()["properties"]
    [projection] = (each["maximum"] for each in bounds["projection_width"]["anyOf"] if "maximum" in each)
    direction = np.ones(max(projection, 2 * bounds["width"]["maximum"]), np.float32)
    frame = Submit(2**64 - 1, 1, 1.0, RequestedOutputs(1, MapRequest("relevance", direction=direction)))
    assert not is_refused(encode(frame), TEXTS_LIMIT)
    assert is_refused(encode(frame), REQUEST_LIMIT)


@pytest.mark.parametrize("shape", [[2], [1, 2, 3], [-1, 5], ["2", 2]])
def test_an_array_whose_shape_contradicts_its_bytes_is_an_error(shape: Any) -> None:
    found = AttentionMap(MapRequest.row(0), np.ones((2, 2), np.float32), 1.0)
    result = InferenceResult(Outputs(np.ones(1, np.float32), np.ones(1, np.int64), found), 1, 0.1, 0.1)
    tag, id_, fields = msgspec.msgpack.decode(encode(Completed(1, result))[4:])
    fields["outputs"]["map"]["values"][0] = shape
    payload = msgspec.msgpack.encode([tag, id_, fields])
    assert is_refused(len(payload).to_bytes(4, "little") + payload)
