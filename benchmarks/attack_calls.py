"""The gRPC calls of `benchmarks.attacks`, from the address of their callers."""

import asyncio
import contextlib
import itertools
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpx

from benchmarks.attack_requests import HOSTILE, MODEL, PATIENCE, Ask, flat
from benchmarks.servers import free_port

_INFER = "/inference.GRPCInferenceService/ModelInfer"


def grpc_port() -> int:
    """Return the gRPC port of all attacked services, the same in all processes."""
    return int(os.environ.setdefault("VITSERVE_BENCHMARK_GRPC_PORT", str(free_port())))


class _Relay:
    """A socket that forwards gRPC connections to the service from an address.

    grpcio cannot choose the address of a client.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._name = f"vitserve-{uuid.uuid4().hex}"
        self._server: asyncio.Task[asyncio.Server] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def target(self) -> str:
        """Return the target of a channel; the socket stays open until the event loop ends."""
        if self._server is None:
            opening = asyncio.start_unix_server(self._begin, f"\0{self._name}")
            self._server = asyncio.create_task(opening)
        await self._server
        return f"unix-abstract:{self._name}"

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwarding = asyncio.create_task(self._forward(reader, writer))
        self._connections.add(forwarding)
        forwarding.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        local_address = (self._address, 0)
        try:
            there = await asyncio.open_connection(
                "127.0.0.1", grpc_port(), local_addr=local_address
            )
        except OSError:
            writer.close()
            return
        there_reader, there_writer = there
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    writer.close()


def grpc(messages: Iterable[bytes], address: str = HOSTILE) -> Ask:
    """Return calls of ModelInfer with these messages in turn; needs grpcio.

    Each call has its own connection.
    """
    turn = itertools.cycle(messages)

    async def call(channel: Any) -> None:
        await channel.unary_unary(_INFER)(next(turn), timeout=PATIENCE)

    return _called(call, address)


def silent_call() -> Ask:
    """Return calls of ModelInfer whose message never comes; needs grpcio."""

    async def no_message() -> Any:
        await asyncio.sleep(PATIENCE)
        yield b""

    async def call(channel: Any) -> None:
        await channel.stream_unary(_INFER)(no_message(), timeout=PATIENCE)

    return _called(call, HOSTILE)


def _called(call: Callable[[Any], Awaitable[None]], address: str) -> Ask:
    """Return a call on its own connection; its outcome is 200 or the status of gRPC."""
    from grpc import aio  # noqa: PLC0415  an optional package

    relay = _Relay(address)

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        async with aio.insecure_channel(await relay.target()) as channel:
            try:
                await call(channel)
            except aio.AioRpcError as error:
                return str(error.code().name)
        return "200"

    return ask


def grpc_message(labels: str | None = None) -> bytes:
    """Return a message of ModelInfer with a JPEG; needs protobuf."""
    from service.extensions.inference_protocol.grpc.descriptors import (  # noqa: PLC0415
        message_class,
    )

    kind = message_class("ModelInferRequest")
    image = kind.InferInputTensor(name="image", datatype="BYTES", shape=[1])
    picture = flat("JPEG", 300)
    parameters = {} if labels is None else {"labels": {"string_param": labels}}
    message = kind(
        model_name=MODEL,
        inputs=[image],
        parameters=parameters,
        raw_input_contents=[len(picture).to_bytes(4, "little") + picture],
    )
    return bytes(message.SerializeToString())
