"""gRPC in one process: answers, refusals, metrics, and limits of connections, memory, messages."""

import asyncio
import resource
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from service.errors import (
    DeadlineExceeded,
    InferenceFailed,
    MalformedRequest,
    ModelFailed,
    SettingsError,
    UploadTooLarge,
)
from service.extensions.inference_protocol.grpc import calls, server
from service.extensions.inference_protocol.grpc.calls import STATUS_CODES
from service.extensions.inference_protocol.grpc.descriptors import message_class
from service.extensions.inference_protocol.grpc.messages import (
    ModelInferRequest,
    check_cost,
    decode_request,
)
from service.extensions.inference_protocol.grpc_port import grpc_port_kept
from service.settings import load_settings
from service.web.problems import TABLE
from tests.extensions.inference_protocol.grpc.caller import (
    arrays,
    calling,
    grpc_port_of,
    image,
    number,
    raw,
)
from tests.service.fakes import (
    CLASSES,
    PATIENCE,
    SIZE,
    expected_indices,
    on_a_loop,
    pixels,
    png,
    until,
)
from tests.service.web.apps import service_in, settle

CALL = "service.extensions.inference_protocol.grpc.call"
Code = grpc.StatusCode
ENDPOINT = "/inference.GRPCInferenceService/ModelInfer"


def elements(*files: bytes) -> bytes:
    """A BYTES tensor as raw bytes."""
    return b"".join(struct.pack("<I", len(file)) + file for file in files)


@on_a_loop
async def test_pixels_are_not_preprocessed() -> None:
    data = np.stack([pixels(1), pixels(2)])
    typed = raw("pixels", "UINT8", list(data.shape), b"")
    del typed.raw_input_contents[:]
    typed.inputs[0].contents.uint_contents.extend(data.ravel().tolist())
    async with calling() as caller:
        for request in (typed, raw("pixels", "UINT8", list(data.shape), data.tobytes())):
            request.outputs.add(name="index")
            assert arrays(await caller.infer(request))["index"].tolist() == [
                expected_indices(red, 5) for red in (1, 2)
            ]


@on_a_loop
async def test_documents_are_those_of_http() -> None:
    request = message_class("ModelRequest")(name="fake").SerializeToString()
    paths = {
        "ServerMetadata": "/v2",
        "ModelMetadata": "/v2/models/fake",
        "ModelConfig": "/v2/models/fake/config",
        "ModelStatistics": "/v2/models/fake/stats",
    }
    async with calling() as caller:
        await caller.infer(image(png(1)))
        for method, path in paths.items():
            response = message_class(f"{method}Response").FromString(
                await caller.call(method, request)
            )
            document = (await caller.service.get(path)).json
            if method == "ModelConfig":
                document = {"config": document}
            assert response == json_format.ParseDict(document, type(response)()), method
    [statistics] = response.model_stats
    assert (statistics.inference_count, statistics.inference_stats.success.count) == (1, 1)


@on_a_loop
async def test_health_follows_the_engine() -> None:
    async def ready(method: str, **model: str) -> bool:
        found = await caller.call(
            method, message_class("ModelRequest")(**model).SerializeToString()
        )
        return bool(message_class("ModelReadyResponse").FromString(found).ready)

    async with calling() as caller:
        service = caller.service
        for state, stopping, expected in (
            ("ready", False, True),
            ("failed", False, False),
            ("ready", True, False),
        ):
            service.engine.state = state
            service.lifecycle.stopping = stopping
            assert await ready("ServerReady") is expected
            assert await ready("ModelReady", name="fake", version="1") is expected
        assert message_class("ServerLiveResponse").FromString(await caller.call("ServerLive")).live
        service.lifecycle.stopping = False
        assert not await ready("ModelReady", name="other")
        assert not await ready("ModelReady", name="fake", version="2")


def _two_numbers_of_classes(request: Any) -> None:
    request.parameters["top_k"].CopyFrom(number(1))
    request.outputs.add(name="score").parameters["classification"].CopyFrom(number(2))


def changed(change: Callable[[Any], object]) -> Any:
    request = image(png(1))
    change(request)
    return request


@on_a_loop
@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (
            changed(lambda request: setattr(request, "model_name", "other")),
            Code.NOT_FOUND,
            "unknown model 'other'",
        ),
        (
            changed(lambda request: setattr(request, "model_version", "2")),
            Code.NOT_FOUND,
            "version '2'",
        ),
        (
            changed(lambda request: request.inputs.add(name="pixels")),
            Code.INVALID_ARGUMENT,
            "expected one, ",
        ),
        (changed(lambda request: request.ClearField("inputs")), Code.INVALID_ARGUMENT, "0 inputs"),
        (
            changed(lambda request: request.outputs.add(name="logit")),
            Code.INVALID_ARGUMENT,
            "'logit'",
        ),
        (
            changed(lambda request: request.raw_input_contents.append(b"")),
            Code.INVALID_ARGUMENT,
            "in addition to",
        ),
        (
            changed(lambda request: request.raw_input_contents.extend([b""] * 2)),
            Code.INVALID_ARGUMENT,
            "2 raw_input",
        ),
        (
            changed(lambda request: request.parameters["top_k"].CopyFrom(number(CLASSES + 1))),
            Code.INVALID_ARGUMENT,
            "1 to 10",
        ),
        (
            changed(
                lambda request: setattr(
                    request.parameters["binary_data_output"], "bool_param", False
                )
            ),
            Code.INVALID_ARGUMENT,
            "outputs are raw in gRPC: omit it",
        ),
        (changed(_two_numbers_of_classes), Code.INVALID_ARGUMENT, "classification 2 differ"),
        (changed(lambda request: request.parameters["top_k"].SetInParent()), None, ""),
        (
            changed(
                lambda request: request.inputs[0].parameters["binary_data_size"].CopyFrom(number(5))
            ),
            Code.INVALID_ARGUMENT,
            "omit it",
        ),
        (raw("image", "BYTES", [2], elements(png(1))), Code.INVALID_ARGUMENT, "1 elements"),
        (
            raw("image", "BYTES", [1], b"\xff\xff\xff\xff"),
            Code.INVALID_ARGUMENT,
            "each begins with its length in bytes, uint32",
        ),
        (raw("pixels", "UINT8", [1, SIZE, SIZE, 3], b"123"), Code.INVALID_ARGUMENT, "3 elements"),
        (raw("pixels", "FP32", [1, SIZE, SIZE, 3], b"123"), Code.INVALID_ARGUMENT, "UINT8"),
        (image(png(1), b"GIF89a nothing"), Code.INVALID_ARGUMENT, "picture 1: "),
        (image(*[b""] * 65), Code.RESOURCE_EXHAUSTED, "at most 64"),
        (b"\x0b", Code.INVALID_ARGUMENT, "not a message"),
        (b"\x0a\x02\xff\xff", Code.INVALID_ARGUMENT, "not the message"),
        (b"\x2a\x00" * 50_000, Code.RESOURCE_EXHAUSTED, "raw_input_contents"),
    ],
)
async def test_invalid_requests_get_a_status_code(request_: Any, code: Any, words: str) -> None:
    async with calling() as caller:
        if not isinstance(request_, bytes) and code is None:
            await caller.infer(request_)
        else:
            error = await caller.refusal(request_)
            assert (error.code(), words in error.details()) == (code, True), error
        assert caller.service.metric("vit_admitted_images") == 0
        await until(lambda: caller.service.metric("vit_inflight_requests") == 0)


@on_a_loop
@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("ModelStreamInfer", "call ModelInfer"),
        ("RepositoryIndex", "POST /v2/repository/index"),
        ("LogSettings", "no such method: call one of .*/inference.GRPCInferenceService/ModelInfer"),
    ],
)
async def test_methods_of_others_name_a_remedy(method: str, remedy: str) -> None:
    async with calling() as caller:
        with pytest.raises(grpc.aio.AioRpcError, match=remedy) as raised:
            await caller.call(method)
        assert raised.value.code() is Code.UNIMPLEMENTED


@on_a_loop
@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (DeadlineExceeded("too late"), Code.DEADLINE_EXCEEDED, "504"),
        (InferenceFailed("no finite score"), Code.INTERNAL, "500"),
        (ModelFailed("dogs: it cannot be read"), Code.FAILED_PRECONDITION, "503"),
        (ValueError("a secret of ours"), Code.INTERNAL, "500"),
    ],
)
async def test_engine_errors_get_a_status_code(error: Exception, code: Any, status: str) -> None:
    async with calling() as caller:
        caller.service.engine.error = error
        found = await caller.refusal(image(png(1)), metadata=(("x-request-id", "mine"),))
        assert (found.code(), "secret" in found.details()) == (code, False)
        assert found.trailing_metadata()["x-request-id"] == "mine"
        await until(
            lambda: caller.service.metric("vit_requests_total", endpoint=ENDPOINT, code=status) == 1
        )


@on_a_loop
async def test_full_service_reads_no_message() -> None:
    async with calling(queue_size=1) as caller:
        service = caller.service
        with service_in(service).limiter.permit():
            full = caller.stream("ModelInfer")
            assert await full.code() == Code.UNAVAILABLE
            assert "all 1 slots" in await full.details()
            assert (await full.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        service.lifecycle.draining = True
        assert await caller.stream("ModelInfer").code() == Code.UNAVAILABLE
        assert service.metric("vit_rejected_total", reason="queue_full") == 1
        assert service.metric("vit_rejected_total", reason="draining") == 1


@on_a_loop
@pytest.mark.parametrize("method", ["ModelInfer", "ModelReady"])
async def test_missing_message_times_out(method: str) -> None:
    async with calling(request_timeout=0.05) as caller:
        assert await caller.stream(method).code() == Code.DEADLINE_EXCEEDED
        ended = caller.stream(method)
        await ended.done_writing()
        assert await ended.code() == Code.INVALID_ARGUMENT


@on_a_loop
async def test_silent_calls_block_no_other_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{CALL}.OWN_GRACE_SECONDS", 3 * PATIENCE)
    async with calling(api_keys="slow:one,quick:two", key_max_requests=100) as caller:
        crowd = [
            caller.stream("ModelInfer", metadata=(("authorization", "Bearer one"),))
            for _ in range(40)
        ]
        await until(lambda: caller.service.metric("vit_inflight_requests") == 40)
        await caller.infer(image(png(1)), metadata=(("authorization", "Bearer two"),))
        assert caller.service.metric("vit_rejected_total", reason="request_timeout") == 0
        for call in crowd:
            call.cancel()


@on_a_loop
async def test_silent_calls_give_way_to_a_crowd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{CALL}.GRACE_SECONDS", 0.05)
    monkeypatch.setattr(calls, "ARRIVALS_PER_CALLER", 8)
    async with calling(api_keys="slow:one,quick:two", key_max_requests=100) as caller:
        crowd = [
            caller.stream("ModelInfer", metadata=(("authorization", "Bearer one"),))
            for _ in range(40)
        ]
        await until(
            lambda: caller.service.metric("vit_rejected_total", reason="request_timeout") > 0
        )
        async with asyncio.timeout(PATIENCE / 6):  # half of the time of a request
            await caller.infer(image(png(1)), metadata=(("authorization", "Bearer two"),))
        for call in crowd:
            call.cancel()


@on_a_loop
async def test_large_messages_are_refused() -> None:
    async with calling(max_request_bytes=100_000) as caller:
        service_in(caller.service).byte_budget.capacity = 50_000
        assert (await caller.refusal(bytes(100_001))).code() == Code.RESOURCE_EXHAUSTED
        refused = await caller.refusal(raw("image", "BYTES", [1], bytes(60_000)))
        assert (refused.code(), "being received" in refused.details()) == (Code.UNAVAILABLE, True)
        compressed = await caller.refusal(image(png(1)), compression=grpc.Compression.Gzip)
        assert compressed.code() == Code.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError, match="more fields or numbers"):
            await caller.call("ModelReady", bytes(70_000))
        await caller.infer(image(png(1)))
        assert service_in(caller.service).byte_budget.in_use == 0


@on_a_loop
async def test_calls_need_a_key_except_health() -> None:
    async with calling(api_keys="name:one,two", key_max_requests=1) as caller:
        service = caller.service
        mine = (("authorization", "Bearer one"),)
        await caller.call("ServerLive")
        await caller.call("ServerReady")
        for metadata in ((), (("authorization", "Bearer three"),), (("authorization", "one"),)):
            assert (
                await caller.refusal(image(png(1)), metadata=metadata)
            ).code() == Code.UNAUTHENTICATED
        await caller.call("ServerMetadata", metadata=mine)
        service.engine.gate.clear()
        held = asyncio.ensure_future(caller.infer(image(png(1)), metadata=mine))
        await until(lambda: service.engine.waiting == 1)
        assert (
            await caller.refusal(image(png(1)), metadata=mine)
        ).code() == Code.RESOURCE_EXHAUSTED
        service.engine.gate.set()
        await held
        assert service.metric("vit_key_requests_total", key="name", code="200") == 2
        await until(lambda: service.metric("vit_key_requests_total", key="name", code="429") == 1)


@on_a_loop
async def test_delayed_refusals_block_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "REFUSALS_PER_SECOND", 1)
    async with calling() as caller:
        await caller.refusal(b"junk")
        second = asyncio.create_task(caller.refusal(b"junk"))
        await caller.infer(image(png(1)))
        assert (second.done(), (await second).code()) == (False, Code.INVALID_ARGUMENT)


@on_a_loop
async def test_disconnect_removes_a_queued_picture() -> None:
    async with calling() as caller:
        service = caller.service
        service.engine.gate.clear()
        call = caller.call("ModelInfer", image(png(1), png(2)).SerializeToString())
        await until(lambda: service.engine.waiting == 2)
        call.cancel()
        await until(lambda: service.metric("vit_cancelled_total") == 1)
        assert service.engine.cancelled == 2
        await until(
            lambda: service.metric("vit_requests_total", endpoint=ENDPOINT, code="499") == 1
        )
        assert service.metric("vit_admitted_images") == 0


@on_a_loop
async def test_accepted_calls_survive_a_stop() -> None:
    async with calling() as caller:
        service = caller.service
        service.engine.gate.clear()
        held = asyncio.ensure_future(caller.infer(image(png(4))))
        await until(lambda: service.engine.waiting == 1)
        service.lifecycle.draining = True
        stopping = asyncio.create_task(caller.stop())
        await settle()
        assert (stopping.done(), service.engine.state) == (False, "ready")
        service.engine.gate.set()
        await stopping
        assert service.engine.state == "closed"
        assert arrays(await held)["index"].tolist() == [expected_indices(4, 5)]


def test_every_error_has_a_grpc_status_code() -> None:
    only_http = {405, 406, 412, 417, 501, 505}
    assert {status for status, _ in TABLE.values()} - only_http <= {
        int(status) for status in STATUS_CODES
    }


@pytest.mark.parametrize("version", [None, "1.67.1", "1.80.1"])
def test_old_grpcio_is_refused(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: version)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert load_settings().model_dump()["grpc_port"] is None
    with pytest.raises(
        SettingsError,
        match=r"^VIT_GRPC_PORT='1': it needs grpcio 1.81 or newer: pip install 'vitserve",
    ):
        load_settings({"grpc_port": "1"})


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
FLOOD_BYTES = 1 << 20
FLOOD_SECONDS = 20.0


@on_a_loop
async def test_keyless_pings_take_no_memory() -> None:
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
    async with calling(api_keys="secret") as caller:
        before = resident_mebibytes()
        with socket.create_connection(("127.0.0.1", caller.port)) as flood:
            flood.settimeout(FLOOD_SECONDS)
            await asyncio.to_thread(
                send_and_read, flood, PREFACE + SETTINGS + ping * (FLOOD_BYTES // len(ping))
            )
            assert await caller.call("ServerLive")
            assert resident_mebibytes() - before < 40


@on_a_loop
async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    async with calling() as caller:
        opened = [
            socket.create_connection(("127.0.0.1", caller.port), timeout=PATIENCE) for _ in range(6)
        ]
        received = [await asyncio.to_thread(greeting, each) for each in opened]
        for each in opened:
            each.close()
        assert [bool(each) for each in received].count(True) == 2


def greeting(connection: socket.socket) -> bytes:
    """What the server says to a new connection; nothing if it closes it."""
    with suppress(ConnectionError):
        connection.sendall(PREFACE + SETTINGS)
        return connection.recv(9)
    return b""


def send_and_read(connection: socket.socket, flood: bytes) -> None:
    """Send all, and only then read, until the server says that these are too many or cuts the
    caller off.
    """
    received = b""
    with suppress(ConnectionError):
        connection.sendall(flood)
        while b"too_many_pings" not in received and (part := connection.recv(1 << 20)):
            received = received[-64:] + part


def resident_mebibytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def test_reserved_port_can_be_shared() -> None:
    with grpc_port_kept(load_settings({"grpc_port": 0})) as settings:
        address = (settings.host, grpc_port_of(settings))
        with (
            socket.create_server(address, reuse_port=True),
            socket.create_server(address, reuse_port=True),
        ):
            socket.create_connection(address, timeout=10).close()


def test_taken_port_is_refused_with_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(SettingsError) as refused,
            grpc_port_kept(load_settings({"grpc_port": port})),
        ):
            pass
    assert str(refused.value) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; "
        "--grpc-port (VIT_GRPC_PORT) chooses another"
    )


def test_two_starting_services_share_no_port() -> None:
    # Nobody listens on the port yet.
    with grpc_port_kept(load_settings({"grpc_port": 0})) as settings:
        second = load_settings({"grpc_port": grpc_port_of(settings)})
        with pytest.raises(SettingsError, match="already in use"), grpc_port_kept(second):
            pass


def test_port_of_ended_connections_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller:
            before.accept()[0].close()
            assert caller.recv(1) == b""
    with grpc_port_kept(load_settings({"grpc_port": port})) as kept:
        assert grpc_port_of(kept) == port


TENSORS = st.builds(
    ModelInferRequest.InferInputTensor,
    name=st.text(max_size=5),
    datatype=st.text(max_size=5),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
)
REQUESTS = st.builds(
    ModelInferRequest,
    model_name=st.text(max_size=5),
    id=st.text(max_size=200),
    inputs=st.lists(TENSORS, max_size=3),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=3),
)


@given(
    st.one_of(
        st.binary(max_size=60), REQUESTS.map(lambda request: request.SerializeToString()[:-1])
    )
)
def test_invalid_message_is_refused(data: bytes) -> None:
    with suppress(MalformedRequest):
        named, _ = decode_request(bytearray(data))
        assert ModelInferRequest.FromString(data).model_name == named.name


@pytest.mark.parametrize(
    "message",
    [
        b"\x2a\x00" * 1_000_000,  # inputs without anything
        b"\x3a\x00" * 1_000_000,  # raw contents
        ModelInferRequest(
            inputs=[{"contents": {"bytes_contents": [b""] * 100_000}}]
        ).SerializeToString(),
        ModelInferRequest(
            inputs=[{"contents": {"uint_contents": [1] * 1_000_001}}]
        ).SerializeToString(),
        ModelInferRequest(parameters={str(i): {} for i in range(1_001)}).SerializeToString(),
        ModelInferRequest(
            outputs=[{"parameters": {str(i): {} for i in range(1_001)}}]
        ).SerializeToString(),
        b"\x7a\x00" * 1_000_000,  # fields that are not known
    ],
    ids=[
        "inputs",
        "raw",
        "elements",
        "numbers",
        "parameters",
        "parameters of an output",
        "unknown",
    ],
)
def test_costly_message_is_not_parsed(message: bytes) -> None:
    with pytest.raises(UploadTooLarge):
        decode_request(bytearray(message))


@pytest.mark.parametrize(
    "message",
    [
        b"\x80" * 11,
        b"\x78" + b"\x80" * 10 + b"\x01",
        b"\x0a",
        b"\x0a\x05abc",
        b"\x09\x00",
        b"\x0b",
        b"\x0f",
    ],
)
def test_broken_framing_is_refused(message: bytes) -> None:
    with pytest.raises(MalformedRequest):
        check_cost(memoryview(message), {})
    with pytest.raises(DecodeError):
        ModelInferRequest.FromString(message)
