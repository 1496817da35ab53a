"""The application on a real socket, and a client that sends arbitrary bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from service.http.connection import HttpConnection as ServerConnection
from service.http.connections import MAX_CONNECTIONS, Connections
from tests.problems import code_of
from tests.service.fakes import PATIENCE
from tests.service.web.apps import App, app


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return code_of(self.status, self.headers, self.body)


class Connection:
    """A client that sends arbitrary bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, to_head: bool = False) -> Answer:
        """Return the next answer; an answer to HEAD lacks the body."""
        async with asyncio.timeout(PATIENCE):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(
                0 if to_head else int(headers.get("content-length", 0))
            )
        return Answer(int(head[0].split()[1]), headers, body)

    async def is_closed(self) -> bool:
        """Return whether the server closes without further bytes."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True


@dataclass
class Listening:
    app: App
    port: int
    connections: Connections

    @property
    def guard(self) -> ServerConnection:
        """Return the only open connection."""
        [guard] = self.connections.open
        return guard

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()

    async def ask(self, data: bytes) -> Answer:
        async with self.connect() as connection:
            await connection.send(data)
            return await connection.answer()


@asynccontextmanager
async def listening(
    max_connections: int = MAX_CONNECTIONS, **settings: Any
) -> AsyncIterator[Listening]:
    """Serve on a free port."""
    service = app(**settings)
    connections = Connections(
        service.asgi, max_connections, idle_seconds=service.settings.keep_alive
    )
    config = uvicorn.Config(
        service.asgi, interface="asgi3", ws="none", lifespan="off", log_config=None
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: connections.protocol(config, state), "127.0.0.1", 0)
    try:
        yield Listening(service, server.sockets[0].getsockname()[1], connections)
    finally:
        server.close()
        for open_one in [*connections.open, *connections.ending]:
            open_one.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


def post(body: bytes, *headers: str, path: str = "/classify", length: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: image/png", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
