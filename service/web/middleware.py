"""What surrounds every request, as plain ASGI: identity, measure, keys, and a polite early refusal.

RequestContextMiddleware          request id, start time, metrics, log line, defects of ours, unread bodies
  (CORS)          Starlette's
    ApiKeyMiddleware       Authorization: Bearer
      routes
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import MalformedRequest, Unauthorized
from service.metrics.metrics import Metrics
from service.web.lifecycle import Lifecycle
from service.web.problems import CLIENT_DISCONNECTED, MEDIA_TYPE, body, problem_of

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that machines ask all the time: logged for debugging only, and no load worth a number."""

BROKEN_FRAMING = "vit.broken_framing"
"""Key of the scope under which the HTTP protocol says how a body broke its framing."""

# How long, how long without a byte, and how much of an unread body is read and thrown away after an early refusal.
_LINGER_SECONDS = 10.0
_LINGER_IDLE_SECONDS = 2.0
_LINGER_BYTES = 256 << 20


def request_id_from(given: str) -> str:
    """The caller's id for its request if it is fit for headers and logs, else one of ours."""
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


class RequestContextMiddleware:
    """The outermost layer: one request and its answer.

    Args:
        app: what it surrounds.
        metrics: request metrics are counted here and nowhere else.
        endpoints: paths that may become label values; any other is `other`.
        lifecycle: while draining, every answer closes its connection.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, endpoints: Iterable[str], lifecycle: Lifecycle) -> None:
        self._app = app
        self._metrics = metrics
        self._endpoints = frozenset(endpoints)
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send, self._lifecycle)
        counted = scope["path"] not in PROBES
        self._metrics.inflight.inc(counted)
        try:
            await self._app(scope, answer.receive, answer.send)
        except Exception as error:  # the last barrier: a defect of ours still gets its answer
            logger.exception("request %s failed", answer.request_id)
            if not answer.started:
                await answer.send_problem(error)
        finally:
            self._metrics.inflight.dec(counted)
            self._finish(scope, answer)

    def _finish(self, scope: Scope, answer: _Answer) -> None:
        path = scope["path"]
        endpoint = path if path in self._endpoints else "other"
        seconds = time.monotonic() - scope["vit.started"]
        self._metrics.requests.labels(endpoint, str(answer.status)).inc()
        self._metrics.request_duration.labels(endpoint).observe(seconds)
        if answer.status == CLIENT_DISCONNECTED:
            self._metrics.cancelled.inc()
        level = logging.DEBUG if path in PROBES else logging.INFO
        if logger.isEnabledFor(level):
            fields = {
                "request_id": answer.request_id,
                "method": scope["method"],
                "path": path,
                "status": answer.status,
                "duration_ms": round(1000 * seconds, 1),
            }
            logger.log(
                level,
                "%(method)s %(path)s %(status)s %(duration_ms)s ms %(request_id)s",
                # Paths come from outside: no line break may start a log line of their own.
                {**fields, "path": path.encode("unicode_escape").decode("ascii")},
                extra={"fields": fields},
            )


class _Answer:
    """One answer on its way out, and what is left unread of its request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, lifecycle: Lifecycle) -> None:
        headers = Headers(scope=scope)
        self.request_id = request_id_from(headers.get("x-request-id", ""))
        self.status = CLIENT_DISCONNECTED  # until an answer starts
        self.started = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._lifecycle = lifecycle
        self._unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        scope["vit.started"] = time.monotonic()
        scope["vit.request_id"] = self.request_id

    async def receive(self) -> Message:
        message = await self._receive_any()
        if BROKEN_FRAMING in self._scope:
            raise MalformedRequest(self._scope[BROKEN_FRAMING])
        return message

    async def _receive_any(self) -> Message:
        message = await self._receive()
        # What comes after broken framing is no body, and has no end but the connection's.
        ended = not message.get("more_body", False) and BROKEN_FRAMING not in self._scope
        if message["type"] == "http.disconnect" or ended:
            self._unread = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = MutableHeaders(raw=list(message.get("headers", [])))
            headers["X-Request-ID"] = self.request_id
            if self._lifecycle.draining or self._unread:
                headers["Connection"] = "close"
            message = {**message, "headers": headers.raw}
        elif self._unread and not message.get("more_body", False):
            # Closing a connection with bytes unread resets it, and the caller may never see the answer.
            # So the answer goes out whole, then the rest of the body is thrown away within bounds.
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def send_problem(self, error: Exception) -> None:
        problem = problem_of(error)
        await send_problem(self.send, problem.status, problem.headers(), body(problem, self.request_id))

    async def _linger(self) -> None:
        left = _LINGER_BYTES
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                while self._unread and left > 0:
                    async with asyncio.timeout(_LINGER_IDLE_SECONDS):
                        left -= len((await self._receive_any()).get("body", b""))
        except TimeoutError:
            return


class ApiKeyMiddleware:
    """`Authorization: Bearer KEY` on every path but the public ones.

    Args:
        app: what it surrounds.
        keys: accepted keys; none means that no key is asked for.
        public: paths that need none.
        metrics: refusals are counted.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], public: Iterable[str], metrics: Metrics) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._public = frozenset(public)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or not self._keys or scope["path"] in self._public or self._knows(scope):
            await self._app(scope, receive, send)
            return
        await refuse(scope, send, Unauthorized("an API key is needed: Authorization: Bearer KEY"), self._metrics)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        offered = given.strip().encode("latin-1")  # the bytes as they were sent
        # Every key is compared, each in constant time, so that timing tells neither which nor how much matched.
        matches = [hmac.compare_digest(offered, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


async def refuse(scope: Scope, send: Send, error: Exception, metrics: Metrics) -> None:
    """Answer a request with what its error is on the wire, and count that."""
    problem = problem_of(error)
    metrics.rejected.labels(problem.code).inc()
    await send_problem(send, problem.status, problem.headers(), body(problem, scope["vit.request_id"]))


async def send_problem(send: Send, status: int, headers: dict[str, str], content: bytes) -> None:
    """A problem document as a whole ASGI answer."""
    raw = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(len(content)).encode())]
    raw += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
