"""A communicator that sends an ASGI application one HTTP request, like a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.problems import code_of
from tests.service.fakes import PATIENCE

Message = dict[str, Any]


class HttpCommunicator:
    """Send one request to an application and collect its answer, message by message."""

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        body: bytes | None = b"",
        query: str = "",
    ) -> None:
        raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        if body is None:
            raw.append((b"transfer-encoding", b"chunked"))
        elif body and not any(name in (b"content-length", b"transfer-encoding") for name, _ in raw):
            raw.append((b"content-length", str(len(body)).encode()))
        self.scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self.app = app
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.received = 0
        if body is not None:
            self.feed(body, more=False)

    def feed(self, body: bytes, *, more: bool = True) -> None:
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def disconnect(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def _receive(self) -> Message:
        self.received += 1
        return await self.inbox.get()

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def run(self) -> HttpCommunicator:
        async with asyncio.timeout(PATIENCE):
            await self.app(self.scope, self._receive, self._send)
        return self

    def start(self) -> asyncio.Task[HttpCommunicator]:
        return asyncio.create_task(self.run())

    @property
    def answered(self) -> bool:
        return bool(self.sent)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode().lower(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def content(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def code(self) -> str:
        """Return the problem code; the answer must be a complete problem document."""
        return code_of(self.status or 0, self.headers, self.content)
