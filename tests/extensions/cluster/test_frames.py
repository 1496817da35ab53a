"""Frames: whatever is sent is what arrives, however the stream is cut."""

import asyncio
import dataclasses
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from model.images.preprocess import ModelInput, Region
from model.methods import methods
from model.outputs import (
    POOLINGS,
    AttentionHead,
    AttentionMap,
    EmbeddingRequest,
    Linear,
    MapRequest,
    Outputs,
    RequestedOutputs,
)
from service.engine.messages import EngineStatus, InferenceResult
from service.errors import CheckpointRefused, ModelsFull, QueueFull
from service.extensions.cluster import frames
from service.extensions.cluster.connection import MAX_BYTES, Connection
from service.extensions.cluster.shared_pixels import SharedPixels
from service.web.image_stores import StoreUsage
from tests.service.fakes import LIBRARY, model_info, on_a_loop
from vitserve.documents import ListedModel

NO_BUFFERS = SharedPixels(memoryview(b""), 0)
IDS = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 2**31 - 1)
SECONDS = st.floats(0, 1e9)
HEADS: st.SearchStrategy[AttentionHead] = st.one_of(
    st.just("mean"), st.just("max"), st.integers(0, 255)
)

WEIGHTS = arrays.arrays(
    np.float32, arrays.array_shapes(min_dims=0, max_dims=2), elements=st.floats(-1, 1, width=32)
)
MAPS = st.builds(
    MapRequest,
    st.sampled_from(list(methods())),
    st.none() | SMALL,
    st.none() | st.integers(0, 255),
    st.none() | HEADS,
    st.none() | st.builds(Linear, WEIGHTS, WEIGHTS, st.booleans()),
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
        kept, score, evidence = (draw(st.floats(0, 1)) for _ in range(3))
        found = AttentionMap(
            draw(MAPS), draw(floats(grid)), kept, score, evidence, draw(st.booleans())
        )
    indices = draw(arrays.arrays(np.int64, top_k, elements=SMALL))
    times = draw(SECONDS), draw(SECONDS)
    logits = draw(st.none() | floats(20))
    embedding = draw(st.none() | floats(12))
    label_set = draw(st.none() | arrays.arrays(np.int64, st.integers(0, 9), elements=SMALL))
    outputs = Outputs(draw(floats(top_k)), indices, found, logits, embedding, label_set=label_set)
    return InferenceResult(outputs, draw(SMALL), *times)


PIXELS = arrays.arrays(np.uint8, (3, 2, 3))
CARRIED = st.builds(frames.Pixels.of, PIXELS, st.just(NO_BUFFERS)) | st.builds(
    frames.Pixels, st.just((3, 2, 3)), SMALL
)
REGIONS = st.builds(Region, *[st.floats(0, 100)] * 4)
PICTURES = st.builds(ModelInput, PIXELS, REGIONS)
ONE = st.builds(
    RequestedOutputs,
    SMALL,
    st.none() | MAPS,
    st.booleans(),
    st.none() | EMBEDDINGS,
    head_name=st.text(),
)
REQUESTED = st.builds(dataclasses.replace, ONE, more=st.lists(ONE, max_size=2).map(tuple))
LISTED = st.builds(
    ListedModel,
    name=st.text(),
    state=st.sampled_from(["ready", "loading", "unloaded", "failed"]),
    reason=st.text(),
    backbone=st.text(),
    classes=st.none() | SMALL,
    bytes=SMALL,
    last_used_seconds=st.none() | SECONDS,
    default=st.booleans(),
    is_served_head=st.booleans(),
)
STATUSES = st.builds(
    EngineStatus,
    st.text(),
    st.sampled_from(["loading", "ready", "failed", "closed"]),
    st.text(),
    st.text(),
    st.none() | st.lists(SMALL).map(tuple),
    SMALL,
    SMALL,
)
REQUESTS: st.SearchStrategy[frames.Request] = st.one_of(
    st.builds(frames.Submit, SMALL, CARRIED, REQUESTED, SECONDS),
    st.builds(frames.EmbedTexts, SMALL, st.lists(st.text(), max_size=9).map(tuple), SECONDS),
    st.builds(
        frames.Change,
        st.sampled_from(
            ["load_next", "take_over", "discard", "load", "unload", "delete", "reload"]
        ),
        st.text(),
        st.none() | st.text() | st.dictionaries(st.text(), st.text() | SMALL),
    ),
    st.builds(frames.Put, CARRIED, REGIONS, st.text()),
    st.builds(frames.Get, st.text()),
)
FRAMES: st.SearchStrategy[frames.Frame] = st.one_of(
    st.builds(frames.Call, IDS, REQUESTS),
    st.builds(frames.Cancel, IDS),
    st.builds(frames.InUse, SMALL, st.booleans()),
    st.builds(frames.Returned, SMALL),
    st.builds(frames.Recalled, SMALL, st.text()),
    st.builds(
        frames.StatusChanged,
        STATUSES,
        st.builds(StoreUsage, SMALL, SMALL, SMALL),
        st.dictionaries(st.text(), LISTED, max_size=3),
        st.dictionaries(st.text(), SMALL, max_size=3),
    ),
    st.builds(
        frames.Granted,
        SMALL,
        st.text(),
        SMALL,
        st.sampled_from([model_info(), model_info(config=LIBRARY, labels=())]),
    ),
    st.builds(frames.Failed, IDS, st.integers(0, len(frames.ERRORS) - 1), st.text()),
)
SUBMIT = frames.Submit(1, frames.Pixels((1, 1, 3), 0), RequestedOutputs(1), 1.0)
ANSWERS: st.SearchStrategy[tuple[frames.Request, Any]] = st.one_of(
    st.tuples(st.builds(lambda: SUBMIT), results()),
    st.tuples(st.just(frames.EmbedTexts(1, (), 1.0)), floats((3, 5))),
    st.tuples(st.just(frames.Get("id")), st.none() | PICTURES),
    st.tuples(st.builds(frames.Put, CARRIED, REGIONS, st.just("id")), st.booleans()),
    st.tuples(
        st.sampled_from([frames.Change("load_next", "m"), frames.Change("discard", reason="no")]),
        st.none(),
    ),
)


def equal(one: Any, other: Any) -> bool:
    """Whether two frames hold the same, arrays and their dtypes included."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            equal(getattr(one, each.name), getattr(other, each.name))
            for each in dataclasses.fields(one)
        )
    if hasattr(one, "__struct_fields__"):
        return type(one) is type(other) and all(
            equal(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__
        )
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(equal, one, other))
    return bool(one == other)


async def received(*pieces: bytes | bytearray) -> list[frames.Frame]:
    found: list[frames.Frame] = []
    connection = Connection(lambda _: found.append)
    connection.connection_made(Mock(asyncio.Transport))
    for piece in pieces:
        begin = 0
        while begin < len(piece):
            buffer = connection.get_buffer(-1)
            part = piece[begin : begin + len(buffer)]
            buffer[: len(part)] = part
            connection.buffer_updated(len(part))
            begin += len(part)
    connection.connection_lost(None)
    await connection.ended()
    return found


@given(sent=st.lists(FRAMES, max_size=4), cut=st.integers(0, 100))
def test_frames_survive_any_cut_of_a_stream(sent: list[frames.Frame], cut: int) -> None:
    data = b"".join(map(frames.encode, sent))
    found = asyncio.run(received(data[:cut], data[cut:]))
    assert len(found) == len(sent)
    assert all(map(equal, sent, found))


@given(
    sizes=st.lists(st.integers(1, 80_000), max_size=5),
    cuts=st.lists(st.integers(0, 300_000), max_size=5),
)
def test_pictures_of_any_length_arrive(sizes: list[int], cuts: list[int]) -> None:
    pictures = [frames.Pixels.of(noise(n, size), NO_BUFFERS) for n, size in enumerate(sizes)]
    sent = [
        frames.Call(n, frames.Submit(1, pixels, RequestedOutputs(1), 1.0))
        for n, pixels in enumerate(pictures)
    ]
    data = b"".join(map(frames.encode, sent))
    places = [0, *sorted(cuts), 400_000]
    found = asyncio.run(received(*(data[begin:end] for begin, end in pairwise(places))))
    assert found == sent


def noise(seed: int, size: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (1, size, 1), np.uint8)


@given(asked=ANSWERS, id_=IDS)
def test_result_equals_the_sent_answer(asked: tuple[frames.Request, Any], id_: int) -> None:
    request, result = asked
    [frame] = asyncio.run(received(frames.encode(frames.Reply(id_, result))))
    assert isinstance(frame, frames.Answer)
    assert frame.id == id_
    assert equal(frames.result_of(frame, request), result)


def test_a_mismatched_answer_is_refused() -> None:
    [frame] = asyncio.run(received(frames.encode(frames.Reply(1, "id"))))
    assert isinstance(frame, frames.Answer)
    with pytest.raises(frames.FrameError, match="no answer of Submit"):
        frames.result_of(frame, SUBMIT)


@given(sent=FRAMES, missing=st.integers(1, 9))
def test_a_frame_that_is_cut_off_is_none(sent: frames.Frame, missing: int) -> None:
    assert asyncio.run(received(frames.encode(sent)[:-missing])) == []


@pytest.mark.parametrize(
    "data",
    [
        (MAX_BYTES + 1).to_bytes(4, "little"),
        b"\1\0\0\0\xc0",
        b"\3\0\0\0\x92\x7f\x00",
        frames.encode(frames.Cancel(1))[:-1] + b"\xc0",
        frames.encode(frames.Failed(1, 0, "x")).replace(b"\x00\xa1", b"\x7e\xa1"),
    ],
    ids=["too long", "nothing", "of an unknown kind", "of another type", "of no known error"],
)
@on_a_loop
async def test_bytes_that_no_frame_has_are_refused(data: bytes) -> None:
    with pytest.raises(frames.FrameError):
        await received(data)


def test_error_keeps_its_type() -> None:
    for error in (QueueFull("all places are taken"), CheckpointRefused("no such file")):
        found = frames.Failed.of(7, error).error()
        assert (type(found), str(found)) == (type(error), str(error))


def test_an_error_says_when_to_try_again() -> None:
    error = frames.Failed.of(1, ModelsFull("no memory", 17)).error()
    assert isinstance(error, ModelsFull)
    assert (str(error), error.retry_after) == ("no memory", 17)
