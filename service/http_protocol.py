"""uvicorn's HTTP/1.1 protocol with bounds on a request's head, and our form of refusal."""

from __future__ import annotations

import asyncio
import secrets

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import MalformedRequest
from service.problems import MEDIA_TYPE, body, problem_of

_MAX_HEAD_BYTES = 64 << 10
_HEAD_SECONDS = 30.0


class HttpProtocol(HttpToolsProtocol):
    """Refuses heads that are too large or too slow; answers broken framing with a problem document."""

    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock: a connection that never asks anything is closed."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(_HEAD_SECONDS, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bound the head: the parser itself takes headers without end."""
        super().data_received(data)
        if self._in_head and self.parser is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.send_400_response(f"The request's head is larger than {_MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, and close."""
        if self.transport.is_closing():
            return
        problem = problem_of(MalformedRequest(msg))
        request_id = secrets.token_hex(16)
        content = body(problem, request_id)
        head = [STATUS_LINE[problem.status]]
        for name, value in (
            *self.server_state.default_headers,
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", str(len(content)).encode()),
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ):
            head += [name, b": ", value, b"\r\n"]
        self.transport.write(b"".join([*head, b"\r\n", content]))
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
