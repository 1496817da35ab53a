"""uvicorn's HTTP/1.1 protocol with bounds on everything but the body, and problem documents as refusals."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.errors import MalformedRequest, MethodNotAllowed, ReceivingFull, ServiceError
from service.web.connections import GIVE_WAY, Rank, make_room, rank_of, watch_for_departure
from service.web.early_refusal import EarlyRefusal
from service.web.http_head import check_head, may_discard
from service.web.middleware import BROKEN_FRAMING, DISCARDS_BODY, PROBES, answered_status, request_id_from
from service.web.problems import problem_of
from service.web.raw_answer import raw_answer
from service.web.refusal_pace import WAITED, PacedFlow, RefusalPace
from service.web.unread_answers import UnreadAnswers

_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256  # each costs thirty times its shortest form in memory
_MAX_WAITING = 8  # requests that came before their answers; one read may hold thousands
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
    _has_refused_early = False
    """Whether a request of the bytes that are being parsed was."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered, or was last."""
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        *arguments: Any,
        max_connections: int = sys.maxsize,
        refuse_early: EarlyRefusal | None = None,
        on_connection: Callable[[], None] = lambda: None,
        unread_answers: UnreadAnswers | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._refuse_early = refuse_early
        self._on_connection = on_connection
        self._pace = RefusalPace() if refuse_early is None else refuse_early.pace
        self._max_connections = max_connections
        self._unread_answers = unread_answers or UnreadAnswers()
        self._turn = next(_TURNS)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock: a connection that never asks anything is closed; so are others, if there are too many."""
        super().connection_made(transport)
        self.flow = self._flow = PacedFlow(transport)
        self._on_connection()
        if len(self.connections) > self._max_connections:
            others = (c for c in self.connections if isinstance(c, HttpProtocol) and c is not self)
            if not make_room(others):
                self._refuse(ReceivingFull(f"all {self._max_connections} connections are in use"))
                self.transport.close()
                return
        self._start_head_timer()

    @property
    def rank(self) -> Rank | None:
        """See `service.web.connections.Connection`."""
        return None if self.transport.is_closing() else rank_of(self.cycle, self._turn)

    def close(self) -> None:
        """Close the connection, but that of a request whose body crawls only after its answer."""
        if self.cycle is None or self.cycle.response_started:
            self.transport.close()
        else:
            cast(dict[str, Any], self.cycle.scope).get(GIVE_WAY, self.transport.close)()

    def pause(self) -> None:
        """Read nothing for a while."""
        self._flow.hold(self.loop.time())

    def resume(self) -> None:
        """Read again."""
        self._flow.let_go(self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and tell the request that is being answered."""
        self._stop_head_timer()
        self._unread_answers.remove(self)
        self._pace.resume(self)
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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer the requests that came whole, then close: a caller that sends no more may still read."""
        if self.pipeline and self.cycle.more_body:  # the last one will never be whole
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else cast(RequestResponseCycle, self._running)
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        running = self._running
        if running is not None and not running.response_started and running.scope["http_version"] != "1.0":
            # A caller that is gone looks the same, until its system refuses what is sent to it: an interim answer,
            # which every client of HTTP/1.1 skips.
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            watch_for_departure(self.transport, self.loop)
        return True

    def shutdown(self) -> None:
        """Close the connection once what is on its way has been heard; the server has stopped listening."""
        self._pace.resume(self)
        self._close_after_turns(_HEARING_TURNS)

    def _close_after_turns(self, turns: int) -> None:
        # A loop that is late runs its timers before it reads: time alone would not let it hear anything.
        if turns == 0:
            super().shutdown()
        else:
            self.loop.call_later(HEARING_SECONDS / _HEARING_TURNS, partial(self._close_after_turns, turns - 1))

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._has_refused_early = False
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
            if self._is_refused_early():
                return
        if waited := self._flow.waited(self.loop.time()):
            cast(dict[str, Any], self.scope)[WAITED] = waited
        super().on_headers_complete()

    def _is_refused_early(self) -> bool:
        """Answer a request that is refused whatever its body is; return whether it was."""
        # Of requests that came at once only the first: thousands in one read would hold the event loop.
        busy = self._has_refused_early or (self.cycle is not None and not self.cycle.response_complete)
        # A caller that does not read its answers is to wait for them.
        if self._refuse_early is None or busy or self.flow.write_paused:
            return False
        request_id = self._request_id()
        problem = self._refuse_early(self.parser.get_method().decode("ascii"), self.url, self.headers, request_id)
        if problem is None:
            return False
        self.transport.write(raw_answer(problem, request_id, self.server_state.default_headers))
        self._has_refused_early = True
        self.server_state.total_requests += 1
        self._turn = next(_TURNS)
        first = (self.scope, self.transport, self.flow, self.logger, self.access_logger)
        self.cycle = RequestResponseCycle(
            *first,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )
        self.cycle.response_started = self.cycle.response_complete = True
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._turn = next(_TURNS)
        self._unset_keepalive_if_required()  # set by one that was refused, and came together with this one
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
            # The application was not asked, or had no room either.
            if answered_status(cast(Scope, self.cycle.scope)) in (None, int(HTTPStatus.SERVICE_UNAVAILABLE)):
                self._pace.refused(self, self.loop)
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Count a refusal after a whole body for the pace, too, and go on with the next request."""
        running = cast(RequestResponseCycle, self._running)
        super().on_response_complete()
        scope = cast(Scope, running.scope)
        is_refused = answered_status(scope) == HTTPStatus.SERVICE_UNAVAILABLE and scope["path"] not in PROBES
        if is_refused and not (running.more_body or self.transport.is_closing()):
            self._pace.refused(self, self.loop)

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
        if self.cycle is None or self.cycle.response_complete:
            self._answer(error)
            return
        self.cycle.keep_alive = False
        if self.cycle.more_body:
            cast(dict[str, Any], self.cycle.scope)[BROKEN_FRAMING] = str(error)
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def _answer(self, error: ServiceError) -> None:
        headers = [*self.server_state.default_headers, (b"connection", b"close")]
        self.transport.write(raw_answer(problem_of(error), self._request_id(), headers))
        # Closed with bytes unread, the connection would be reset, and the caller might never see the answer.
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _request_id(self) -> str:
        return request_id_from(dict(reversed(self.headers or ())).get(b"x-request-id", b"").decode("latin-1"))

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
