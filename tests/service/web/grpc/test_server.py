"""The port of gRPC, and what its callers may take of the process: connections, memory, messages."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from service.cli.serve import _check_address, grpc_port_kept
from service.errors import MalformedRequest, UploadTooLarge
from service.settings import load_settings
from service.web.grpc import calls
from service.web.grpc.messages import check_cost, decode_request
from service.web.grpc.open_inference_pb2 import InferParameter, ModelInferRequest
from tests.service.fakes import PATIENCE, on_a_loop
from tests.service.web.grpc.caller import calling

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
FLOOD_BYTES = 1 << 20
FLOOD_SECONDS = 20.0


@on_a_loop
async def test_pings_without_a_key_are_not_kept_in_memory() -> None:
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
    async with calling(api_keys="secret") as caller:
        before = resident_mebibytes()
        with socket.create_connection(("127.0.0.1", caller.port)) as flood:
            flood.settimeout(FLOOD_SECONDS)
            await asyncio.to_thread(send_and_read, flood, PREFACE + SETTINGS + ping * (FLOOD_BYTES // len(ping)))
            assert await caller.call("ServerLive")
            assert resident_mebibytes() - before < 40


@on_a_loop
async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_CONNECTIONS", 2)
    async with calling() as caller:
        opened = [socket.create_connection(("127.0.0.1", caller.port), timeout=PATIENCE) for _ in range(6)]
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
    """Send all, and only then read, until the server says that these are too many or cuts the caller off."""
    received = b""
    with suppress(ConnectionError):
        connection.sendall(flood)
        while b"too_many_pings" not in received and (part := connection.recv(1 << 20)):
            received = received[-64:] + part


def resident_mebibytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def test_a_free_port_is_chosen_and_listeners_that_share_it_may_come() -> None:
    with grpc_port_kept(load_settings({"grpc_port": 0})) as settings:
        assert settings.grpc_port
        address = (settings.host, settings.grpc_port)
        with socket.create_server(address, reuse_port=True), socket.create_server(address, reuse_port=True):
            socket.create_connection(address, timeout=10).close()


def test_a_port_that_is_taken_ends_the_start_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            _check_address(load_settings({"port": 0, "grpc_port": port}))
    assert str(ended.value) == (
        f"vitserve: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "--grpc-port (VIT_GRPC_PORT) chooses another"
    )


def test_two_services_that_start_at_the_same_time_do_not_share_a_port() -> None:
    # Nobody listens on the port yet.
    with grpc_port_kept(load_settings({"grpc_port": 0})) as settings, pytest.raises(SystemExit, match="already in use"):
        _check_address(load_settings({"port": 0, "grpc_port": settings.grpc_port}))


def test_a_port_on_which_connections_have_just_ended_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller:
            before.accept()[0].close()
            assert caller.recv(1) == b""
    settings = load_settings({"port": 0, "grpc_port": port})
    _check_address(settings)
    with grpc_port_kept(settings) as kept:
        assert kept.grpc_port == port


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


@given(st.one_of(st.binary(max_size=60), REQUESTS.map(lambda request: request.SerializeToString()[:-1])))
def test_whatever_is_no_message_is_refused_as_such(data: bytes) -> None:
    with suppress(MalformedRequest):
        named, _ = decode_request(bytearray(data))
        assert ModelInferRequest.FromString(data).model_name == named.name  # what is read is what protobuf reads


@pytest.mark.parametrize(
    "message",
    [
        b"\x2a\x00" * 1_000_000,  # inputs without anything
        b"\x3a\x00" * 1_000_000,  # raw contents
        ModelInferRequest(inputs=[{"contents": {"bytes_contents": [b""] * 100_000}}]).SerializeToString(),
        ModelInferRequest(inputs=[{"contents": {"uint_contents": [1] * 1_000_001}}]).SerializeToString(),
        ModelInferRequest(parameters={str(i): InferParameter() for i in range(20_000)}).SerializeToString(),
        b"\x7a\x00" * 1_000_000,  # fields that are not known
    ],
    ids=["inputs", "raw", "elements", "numbers", "parameters", "unknown"],
)
def test_a_message_of_very_many_things_is_refused_before_it_is_parsed(message: bytes) -> None:
    with pytest.raises(UploadTooLarge):
        decode_request(bytearray(message))


@pytest.mark.parametrize(
    "message", [b"\x80" * 11, b"\x78" + b"\x80" * 10 + b"\x01", b"\x0a", b"\x0a\x05abc", b"\x09\x00", b"\x0b", b"\x0f"]
)
def test_broken_framing_is_refused(message: bytes) -> None:
    with pytest.raises(MalformedRequest):
        check_cost(memoryview(message), {})
    with pytest.raises(DecodeError):
        ModelInferRequest.FromString(message)
