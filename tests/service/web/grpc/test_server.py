"""What callers of gRPC may take of the process: connections, and memory for their pings."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from service.web.grpc import calls
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
