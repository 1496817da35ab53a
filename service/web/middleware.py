"""The layers around every request, as plain ASGI.

RequestContextMiddleware      request id, start time, metrics, log line
  (ProblemMiddleware)         and layers of extensions, if there are any
    (CORSMiddleware)          Starlette's, if VIT_CORS_ORIGINS is set
      ProblemMiddleware       errors become problem documents
        OriginMiddleware      Host and Origin
          (ApiKeyMiddleware)  Authorization: Bearer, see `service.web.api_keys`
            routes
"""

import asyncio
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.addresses import network_of
from service.draining import Lifecycle
from service.errors import ClientDisconnected, ServiceError, Unauthorized
from service.http.application import AnswerRoom, Header
from service.http.connection import connection_of
from service.models.version import Lease
from service.observe.logs import shortened
from service.observe.metrics import Metrics, stage_seconds
from service.server import TRUSTED_PROXY
from service.web import problems
from service.web.path_rules import PathRules
from service.web.prefix import Prefixes
from service.web.refusal_pace import RefusalPace

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

_CONTEXT = "vit.context"

_UNPARSED = "unparsed"
"""Endpoint in the metrics for bytes that were not a request."""

LINES_A_SECOND = 10
"""Refusals per second that get a log line each."""

_MAX_PATH = 200
"""Characters of a request's path in its log line."""

_MAX_ADDRESS = 64
"""Most characters kept of an address: a proxy may send any text, and it is remembered."""


def request_id_from(sent_id: str) -> str:
    """Return the caller's id for its request if it is valid, else a random one."""
    if _REQUEST_ID.fullmatch(sent_id):
        return sent_id
    # Not from the system's generator: that call releases the interpreter, and under load this
    # thread would wait milliseconds to get it back. The id is not a secret.
    return f"{random.getrandbits(128):032x}"


def request_context(scope: Scope) -> "RequestContext":
    """Return the context of a request that came through `RequestContextMiddleware`."""
    context: RequestContext = scope[_CONTEXT]
    return context


@dataclass
class Answered:
    """A request and its answer, over HTTP or the protocol of an extension.

    Attributes:
        method: HTTP method; the name of another protocol.
        path: path of the request.
        request_id: id in the answer's headers and in the log.
        status: HTTP status of the answer; 0 before it starts.
        seconds: time from the request headers to the answer's end.
        key_name: name of the API key, if any.
        client: address of the caller. It and the next attributes are logged only in JSON.
        model: name of the requested model, if known.
        code: code of the problem that answers the request, if any.
    """

    method: str
    path: str
    request_id: str
    status: int = 0
    seconds: float = 0.0
    key_name: str | None = None
    client: str | None = None
    model: str | None = None
    code: str | None = None

    def measured(self) -> dict[str, float]:
        """Return further measurements for a log line in JSON."""
        return {}


class RequestContext(Answered):
    """The context of one request over HTTP.

    Attributes:
        started: monotonic seconds at which the request headers had been read.
        endpoint: path of the route that answers, None until it is known.
        key_owner: owner of the API key, None without a key.
        prefix: prefix of the path for links in the answer; None if a proxy sent an invalid one.
        stages: seconds of each stage, see `service.observe.metrics.stage_seconds`.
        leases: the models that the request holds; its endpoint releases them.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, lifecycle: Lifecycle, started: float
    ) -> None:
        sent_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        client = scope.get("client")
        super().__init__(
            scope["method"],
            scope["path"],
            request_id_from(sent_id.decode("latin-1")),
            client=client and client[0][:_MAX_ADDRESS],
        )
        self.started = started
        self.endpoint: str | None = None
        self.key_owner: str | None = None
        self.prefix: str | None = ""
        self.stages: dict[str, float] = {}
        self.leases: list[Lease] = []
        self._received_bytes = 0
        self._sent_bytes = 0
        self._receive = receive
        self._send = send
        self._lifecycle = lifecycle

    @property
    def caller(self) -> str:
        """Return the name of the API key, or the network of the client without a key."""
        return self.key_name or network_of(self.client or "")

    def measured(self) -> dict[str, float]:
        """Return the bytes and stage times for a log line in JSON."""
        times = {f"{stage}_ms": round(1000 * seconds, 1) for stage, seconds in self.stages.items()}
        return {"bytes_in": self._received_bytes, "bytes_out": self._sent_bytes} | times

    async def receive(self) -> Message:
        """Return the next message of the request."""
        message = await self._receive()
        self._received_bytes += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer, with the headers of every answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            if self._lifecycle.stopping:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        self._sent_bytes += len(message.get("body", b""))
        await self._send(message)


class RequestLog:
    """Logs requests; belongs to one event loop.

    In a flood most requests are refused, and a log line costs as much as a refusal. Therefore only
    the first refusals of a second have their own lines. A line at the end of the second counts the
    others by reason.
    """

    def __init__(self) -> None:
        self._lines_this_second = 0
        self._unlogged: Counter[str] = Counter()

    def answered(self, level: int, request: Answered) -> None:
        """Log an answered request."""
        if not logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "request_id": request.request_id,
            "method": request.method,
            "path": shortened(request.path, _MAX_PATH),
            "status": request.status,
            "duration_ms": round(1000 * request.seconds, 1),
        }
        line = "%(method)s %(path)s %(status)s %(duration_ms)s ms %(request_id)s"
        if request.key_name is not None:
            fields["key"] = request.key_name
            line += " %(key)s"
        optional = {"client": request.client, "model": request.model, "code": request.code}
        known = {name: value for name, value in optional.items() if value is not None}
        # Escape the path, because a line break in it could forge a log line.
        escaped = {**fields, "path": fields["path"].encode("unicode_escape").decode("ascii")}
        json_fields = fields | known | request.measured()
        logger.log(level, line, escaped, extra={"fields": json_fields, "summary": "request"})

    def has_own_line(self, reason: str) -> bool:
        """Return whether the current refusal has its own line; otherwise count its reason."""
        if not self._lines_this_second:
            asyncio.get_running_loop().call_later(1.0, self.end_second)
        if self._lines_this_second < LINES_A_SECOND:
            self._lines_this_second += 1
            return True
        self._unlogged[reason] += 1
        return False

    def end_second(self) -> None:
        """Log the number of refusals without a line, if any, and start a new second."""
        self._lines_this_second = 0
        if not self._unlogged:
            return
        refused = dict(self._unlogged)
        self._unlogged.clear()
        reasons = ", ".join(f"{count} {reason}" for reason, count in refused.items())
        logger.info(
            "refused %d more: %s",
            sum(refused.values()),
            reasons,
            extra={"fields": {"refused": refused}},
        )


class RequestContextMiddleware:
    """The outermost layer: gives each request its context, measures and logs it.

    Args:
        app: the next layer.
        metrics: where requests are counted.
        endpoints: paths that become label values; all others share the value `other`.
        lifecycle: state of the process; while it ends, every answer closes its connection.
        answer_room: room for unsent answers, see `service.http.application.HttpApplication`.
        prefixes: removes a proxy's prefix from the path, before any other layer reads it.
        probes: paths that machines poll: logged only for debugging, and not counted in flight.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        endpoints: Iterable[str],
        lifecycle: Lifecycle,
        answer_room: AnswerRoom,
        prefixes: Prefixes,
        probes: frozenset[str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._metrics = metrics
        # Cached, because prometheus_client looks up labels under a lock.
        self._requests = lru_cache(maxsize=512)(metrics.requests.labels)
        self._duration = lru_cache(maxsize=64)(metrics.request_duration.labels)
        self._key_requests = lru_cache(maxsize=512)(metrics.key_requests.labels)
        self._endpoints = frozenset(endpoints)
        self._lifecycle = lifecycle
        self.answer_room = answer_room
        self._prefixes = prefixes
        self._probes = probes
        self._clock = clock
        self.log = RequestLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            self.log.end_second()  # the lifespan has ended
            return
        context = RequestContext(scope, receive, send, self._lifecycle, self._clock())
        if self._prefixes.root_path or scope.get("root_path") or scope.get(TRUSTED_PROXY):
            context.prefix = self._prefixes.take_off(scope)
            context.path = scope["path"]
        scope[_CONTEXT] = context
        stage_seconds.set(context.stages)
        counted = scope["path"] not in self._probes
        if counted:
            self._metrics.inflight.inc()
        try:
            await self._app(scope, context.receive, context.send)
        except Exception:  # `ProblemMiddleware` has answered, or the answer had already begun
            logger.exception("request %s failed", context.request_id)
        finally:
            if counted:
                self._metrics.inflight.dec()
            context.status = context.status or problems.CLIENT_DISCONNECTED
            context.seconds = self._clock() - context.started
            self.count(context, context.endpoint)

    def count(self, answered: Answered, route: str | None) -> None:
        """Count and log an answered request; `route` is the path of the route, if known."""
        path = answered.path
        status = answered.status
        endpoint = path if path in self._endpoints else route or "other"
        is_refusal = answered.code is not None and status in (429, 503)
        self._requests(endpoint, str(status)).inc()
        self._duration(endpoint).observe(answered.seconds)
        if answered.key_name is not None:
            self._key_requests(answered.key_name, str(status)).inc()
        if status == problems.CLIENT_DISCONNECTED:
            self._metrics.cancelled.inc()
        if path in self._probes:
            self.log.answered(logging.DEBUG, answered)
            return
        if self._lifecycle.stopping and is_refusal:
            self._lifecycle.refused += 1
        elif self._lifecycle.stopping:
            self._lifecycle.answered += 1
        if not is_refusal or self.log.has_own_line(answered.code or ""):
            self.log.answered(logging.INFO, answered)

    def refuse(
        self, error: ServiceError, headers: Iterable[Header]
    ) -> tuple[int, list[Header], bytes]:
        """Count and log a refused connection, or bytes that are not a request.

        Returns the status, the headers and the body of the answer; see
        `service.http.application.HttpApplication`.
        """
        problem = problems.problem_of(error)
        request_id = request_id_from(dict(headers).get(b"x-request-id", b"").decode("latin-1"))
        self._requests(_UNPARSED, str(problem.status)).inc()
        self._metrics.rejected.labels(problem.code).inc()
        if self.log.has_own_line(problem.code):
            fields = {"request_id": request_id, "status": problem.status, "detail": problem.detail}
            logger.info(
                "no request: %(status)s %(detail)s %(request_id)s", fields, extra={"fields": fields}
            )
        answer = problem.answer(request_id)
        answer_headers = [*answer.raw_headers, (b"x-request-id", request_id.encode())]
        return problem.status, answer_headers, bytes(answer.body)


class ProblemMiddleware:
    """Answers errors of the inner layers with a problem document, and counts them.

    A defect of the service is raised again after its answer, so that it is logged.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, pace: RefusalPace, rules: PathRules) -> None:
        self._app = app
        self._metrics = metrics
        self._pace = pace
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = request_context(scope)
        path = scope["path"]
        try:
            await self._app(scope, receive, send)
        except ClientDisconnected:
            return
        except Exception as error:
            if context.status:
                raise
            problem = problems.problem_of(error)
            context.code = problem.code
            # A 503 to a probe is a state, not a refusal.
            if path not in self._rules.probes or isinstance(error, Unauthorized):
                self._metrics.rejected.labels(problem.code).inc()
                delay = self._pace.delay_after(error, connection_of(scope), context.caller)
                await asyncio.sleep(delay)
            other_form = self._rules.problem_answer(path)
            if other_form is None:
                answer = problem.answer(context.request_id)
            else:
                answer = other_form(problem)
            await answer(scope, receive, send)
            if problem.code == problems.INTERNAL_ERROR:
                raise
