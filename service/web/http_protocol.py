"""uvicorn's HTTP/1.1 protocol with bounds on everything but the body, and problem documents as refusals."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service.errors import MalformedRequest, MethodNotAllowed, ReceivingFull, ServiceError
from service.web.connections import GIVE_WAY, Rank, make_room, rank_of
from service.web.http_head import check_head, may_discard
from service.web.middleware import BROKEN_FRAMING, DISCARDS_BODY, request_id_from
from service.web.problems import MEDIA_TYPE, Problem, body, problem_of
from service.web.unread_answers import UnreadAnswers

_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256  # each costs thirty times its shortest form in memory
_MAX_WAITING = 8  # requests that came before their answers; one read may hold thousands
SURPLUS = 64
"""Connections beyond the limit: those that are refused, until their callers have read so, or that close slowly."""
HEAD_SECONDS = 30.0
LINGER_SECONDS = 2.0
HEARING_SECONDS = 0.5
_HEARING_TURNS = 5

_TURNS = itertools.count()


class HttpProtocol(HttpToolsProtocol):
    """Refuses heads (and chunk extensions, and trailers) that are too large or too slow, and lets go of callers that
    ask and do not read.

    Broken framing of a body is reported to the request's handler, which answers it; anything else that is not HTTP is
    answered here with a problem document, unless earlier requests still wait for their answers: those go out, then the
    connection closes, as it does when very many wait. A caller that offers another protocol is answered in this one; a
    tunnel (CONNECT) is refused in the same way as what is not HTTP, with 405.
    """

    _overhead = 0
    """Bytes since the last that belonged to a body or ended a request."""
    _offer = False
    """Whether this head asks to go on in another protocol."""
    _refused = False
    _is_surplus = False
    """Whether it was refused because there were too many."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered, or was last."""
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        *arguments: Any,
        max_connections: int = sys.maxsize,
        on_connection: Callable[[], None] = lambda: None,
        on_unparsed: Callable[[Problem, str], None] = lambda problem, request_id: None,
        unread_answers: UnreadAnswers | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._on_connection = on_connection
        self._on_unparsed = on_unparsed
        self._max_connections = max_connections
        self._unread_answers = unread_answers or UnreadAnswers()
        self._turn = next(_TURNS)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock: a connection that never asks anything is closed; so are others, if there are too many."""
        super().connection_made(transport)
        self._made = self.loop.time()
        self._on_connection()
        if len(self.connections) <= self._max_connections or self._has_room():
            self._start_head_timer()
            return
        self._is_surplus = True
        self._refuse(ReceivingFull(f"all {self._max_connections} connections are in use"))
        if len(self.connections) > self._max_connections + SURPLUS:
            self.transport.close()

    def _has_room(self) -> bool:
        """Return whether there is room for this connection, or others gave way to it."""
        others = [c for c in self.connections if isinstance(c, HttpProtocol) and c is not self]
        # What closes, but has an answer to send, holds its descriptor.
        held = sum(not (c.transport.is_closing() or c._is_surplus) for c in others)
        is_full = held >= self._max_connections or len(others) >= self._max_connections + SURPLUS
        return not is_full or make_room(others)

    @property
    def rank(self) -> Rank | None:
        """See `service.web.connections.Connection`."""
        if self._is_surplus or self.transport.is_closing():
            return None
        return rank_of(self.cycle, self._turn, self.loop.time() - self._made)

    def close(self) -> None:
        """Close the connection, but that of a request whose body crawls only after its answer."""
        if self.cycle is None or self.cycle.response_started:
            self.transport.close()
        else:
            cast(dict[str, Any], self.cycle.scope).get(GIVE_WAY, self.transport.close)()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and tell the request that is being answered."""
        self._stop_head_timer()
        self._unread_answers.remove(self)
        super().connection_lost(exc)
        # uvicorn tells the newest request, which may be one that waits for its turn behind this one.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Bound the parser's unlimited inputs: headers, chunk extensions, trailers, and waiting for them."""
        if self._refused:  # what still comes has no meaning any more
            return
        self._overhead += len(data)
        self._feed(data)
        if self._overhead > _MAX_HEAD_BYTES:
            self.send_400_response(f"more than {_MAX_HEAD_BYTES} bytes that are no body")
        elif self.cycle is None or (self.cycle.response_complete and (self._overhead or self.cycle.more_body)):
            # A new head has begun, or a body is thrown away, and uvicorn has stopped its clock for idle connections.
            self._start_head_timer()

    def shutdown(self) -> None:
        """Close the connection once what is on its way has been heard; the server has stopped listening."""
        self._close_after_turns(_HEARING_TURNS)

    def _close_after_turns(self, turns: int) -> None:
        # A loop that is late runs its timers before it reads: time alone would not let it hear anything.
        if turns == 0:
            super().shutdown()
        else:
            self.loop.call_later(HEARING_SECONDS / _HEARING_TURNS, partial(self._close_after_turns, turns - 1))

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest and not self._refused:
                rest = rest[self._parse(rest) :]
        except httptools.HttpParserError:
            self.send_400_response("this is not HTTP/1.1")

    def _parse(self, data: memoryview) -> int:
        """Return the number of bytes parsed: at least one, and all of them unless a head asks for another protocol."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade()
            end_of_head: int = upgrade.args[0]
            return end_of_head
        return len(data)

    def _decline_upgrade(self) -> None:
        """Parse the head again without its offer, so that what follows is its body; refuse a CONNECT.

        No server need accept an offer, and Java's client makes one (h2c) with each of its first requests. A CONNECT
        stays one however its headers are changed, and what follows it is not HTTP.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            # No method is allowed on the other host that a CONNECT names.
            self._refuse(MethodNotAllowed("CONNECT: this server is no proxy"))
            return
        lines = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        # The parser that read a head that says "close" parses nothing more.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header or trailer, unless there are too many."""
        if len(self.headers) >= _MAX_HEADERS:
            self.send_400_response(f"more than {_MAX_HEADERS} headers")
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the head's timer, unless the request asks for another protocol."""
        if self._refused:
            return
        if len(self.pipeline) >= _MAX_WAITING:
            raise httptools.HttpParserError("too many requests before their answers: nothing more is parsed")
        self._offer = self.parser.should_upgrade()
        if self._offer:
            return
        self._stop_head_timer()
        # A whole head may come in one read, and what follows it would reset the count of framing bytes.
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > _MAX_HEAD_BYTES:
            self.send_400_response(f"a head of more than {_MAX_HEAD_BYTES} bytes")
            return
        version = self.parser.get_http_version()
        self.expect_100_continue &= version != "1.0"  # whose clients know no interim answer
        try:
            check_head(version, self.headers)
        except ServiceError as error:
            self._refuse(error)
            return
        if may_discard(version, self.headers):
            cast(dict[str, Any], self.scope)[DISCARDS_BODY] = True
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._turn = next(_TURNS)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Reset the count of framing bytes: the body is bounded by whoever reads it."""
        if self._refused:
            return
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the count of framing bytes at the end of a request."""
        if self._offer or self._refused:
            return
        self._overhead = 0
        super().on_message_complete()
        if self.cycle.response_complete and self.cycle.more_body:  # answered early, and now read to its end
            self.cycle.more_body = False
            self._stop_head_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def pause_writing(self) -> None:
        """Start the clock of a caller that does not read its answers."""
        super().pause_writing()
        self._unread_answers.add(self, self.loop)

    def resume_writing(self) -> None:
        """Stop the clock of a caller that reads again."""
        self._unread_answers.remove(self)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, and close the connection."""
        self._refuse(MalformedRequest(msg))

    def _refuse(self, error: ServiceError) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_head_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            if self.cycle.more_body:
                cast(dict[str, Any], self.cycle.scope)[BROKEN_FRAMING] = str(error)
                self.cycle.more_body = False
                self.cycle.message_event.set()
                return
        problem = problem_of(error)
        request_id = request_id_from(dict(reversed(self.headers or ())).get(b"x-request-id", b"").decode("latin-1"))
        self._on_unparsed(problem, request_id)
        if self.cycle is None or self.cycle.response_complete:
            self._answer(problem, request_id)

    def _answer(self, problem: Problem, request_id: str) -> None:
        content = body(problem, request_id)
        headers = {
            "connection": "close",
            "content-type": MEDIA_TYPE,
            "content-length": str(len(content)),
            "x-request-id": request_id,
            **{name.lower(): value for name, value in problem.headers.items()},
        }
        lines = [name + b": " + value for name, value in self.server_state.default_headers]
        lines += [f"{name}: {value}".encode() for name, value in headers.items()]
        self.transport.write(STATUS_LINE[problem.status] + b"\r\n".join([*lines, b"", content]))
        # Closed with bytes unread, the connection would be reset, and the caller might never see the answer.
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
