"""The layers around every request, as plain ASGI.

RequestContextMiddleware      request id, start time, metrics, log line
  (CORSMiddleware)            Starlette's
    ProblemMiddleware         errors become problem documents
      OriginMiddleware        Host and Origin, see `service.web.origins`
      ApiKeyMiddleware        Authorization: Bearer, see `service.web.api_keys`
        routes
"""

import asyncio
import json
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import (
    ClientDisconnected,
    EngineUnavailable,
    QueueFull,
    ServiceError,
    Unauthorized,
)
from service.http import AnswerRoom, Header, connection_of
from service.lifecycle import Lifecycle
from service.observe.metrics import Metrics, stage_seconds
from service.web import problems
from service.web.admission import RefusalPace
from service.web.prefix import Prefixes

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

PROBES = frozenset(
    {"/healthz", "/readyz", "/ping", "/metrics", "/v2/health/live", "/v2/health/ready"}
) | {
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
}
"""Paths that machines ask all the time: logged for debugging only, and no load worth a number."""

_CONTEXT = "vit.context"

_UNPARSED = "unparsed"
"""Endpoint under which is counted what never became a request."""

LINES_A_SECOND = 10
"""Refusals that have a line of their own in each second."""

_MAX_PATH = 200
"""Characters of a request's path in its line."""


def request_id_from(given: str) -> str:
    """Return the caller's id for its request if it is fit for headers and logs, else a random id,
    no secret.
    """
    # The system's generator lets other threads run Python, and under load this thread waits
    # milliseconds for its turn.
    return given if given and _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


def request_context(scope: Scope) -> "RequestContext":
    """Return the context of a request that came through `RequestContextMiddleware`."""
    context: RequestContext = scope[_CONTEXT]
    return context


class RequestContext:
    """The context of one request.

    Attributes:
        started: monotonic seconds at which its head had been read.
        client: address of the caller, None if it is not known.
        status: of the answer; None until it starts.
        endpoint: path of the route that answers, None until it is known.
        key_name, key_owner: of the API key, None without a key.
        code: of the problem that answers it, None without a problem.
        model: name of the model that it is for, None until it is known.
        prefix: of the path, which links of the answer begin with; None if a proxy sends what is not
        one.
        stages: seconds of each, see `service.observe.metrics.stage_seconds`.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, lifecycle: Lifecycle, started: float
    ) -> None:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        self.request_id = request_id_from(given.decode("latin-1"))
        self.started = started
        self.status: int | None = None
        self.endpoint: str | None = None
        self.key_name: str | None = None
        self.key_owner: str | None = None
        self.code: str | None = None
        self.model: str | None = None
        self.prefix: str | None = ""
        self.stages: dict[str, float] = {}
        self.client: str | None = (scope.get("client") or (None,))[0]
        self._received = self._sent = 0
        self._receive = receive
        self._send = send
        self._lifecycle = lifecycle

    def measured(self) -> dict[str, float]:
        """Return the bytes and the times of stages that a log line in JSON has."""
        times = {f"{stage}_ms": round(1000 * seconds, 1) for stage, seconds in self.stages.items()}
        return {"bytes_in": self._received, "bytes_out": self._sent} | times

    async def receive(self) -> Message:
        """Return the next message of the request."""
        message = await self._receive()
        self._received += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer, with the headers that every answer has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            if self._lifecycle.stopping:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        self._sent += len(message.get("body", b""))
        await self._send(message)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered, over HTTP or gRPC, with its status of HTTP and the seconds from
    its head on.

    The last four stand in JSON alone, as far as they are known: the caller's address, model,
    problem code, and what was measured.
    """

    method: str
    path: str
    status: int
    seconds: float
    request_id: str
    key_name: str | None = None
    client: str | None = None
    model: str | None = None
    code: str | None = None
    measured: Callable[[], Mapping[str, float]] = dict


class RequestLog:
    """Logs requests. Belongs to one event loop.

    Under a flood most requests are refused, and a line costs as much as the refusal itself. So only
    the first refusals of a second have their own lines. A line at its end counts the others, by
    reason.
    """

    def __init__(self) -> None:
        self._own_lines = 0
        self._more: Counter[str] = Counter()

    def answered(self, level: int, request: Answered) -> None:
        """Log a request that was answered."""
        if not logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "request_id": request.request_id,
            "method": request.method,
            "path": problems.shortened(request.path, _MAX_PATH),
            "status": request.status,
            "duration_ms": round(1000 * request.seconds, 1),
        }
        line = "%(method)s %(path)s %(status)s %(duration_ms)s ms %(request_id)s"
        if request.key_name is not None:
            fields["key"] = request.key_name
            line += " %(key)s"
        known = {"client": request.client, "model": request.model, "code": request.code}
        logger.log(
            level,
            line,
            # Paths come from outside: no line break may start a log line of their own.
            {**fields, "path": fields["path"].encode("unicode_escape").decode("ascii")},
            extra={
                "fields": fields
                | {name: value for name, value in known.items() if value is not None}
                | dict(request.measured()),
                "summary": "request",
            },
        )

    def has_own_line(self, reason: str) -> bool:
        """Return whether a request that is refused now has its own line; if not, count its problem
        code.
        """
        if not self._own_lines:
            asyncio.get_running_loop().call_later(1.0, self.end_second)
        if self._own_lines < LINES_A_SECOND:
            self._own_lines += 1
            return True
        self._more[reason] += 1
        return False

    def end_second(self) -> None:
        """Log how many more were refused since the last such line, if any were."""
        self._own_lines = 0
        if not self._more:
            return
        refused = dict(self._more)
        self._more.clear()
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
        endpoints: paths that may become label values; any other is `other`.
        prefixes: takes the prefix of a proxy off the path, before any other layer reads it.
        lifecycle: when the process is about to end, every answer closes its connection.
        answer_room: the room for unsent answers, see `service.http.Application`.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        endpoints: Iterable[str],
        lifecycle: Lifecycle,
        answer_room: AnswerRoom,
        prefixes: Prefixes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._metrics = metrics
        # A child of a metric is looked up under a lock; there are few of them.
        self._requests = lru_cache(maxsize=512)(metrics.requests.labels)
        self._duration = lru_cache(maxsize=64)(metrics.request_duration.labels)
        self._key_requests = lru_cache(maxsize=512)(metrics.key_requests.labels)
        self._endpoints = frozenset(endpoints)
        self._lifecycle = lifecycle
        self.answer_room = answer_room
        self._prefixes = prefixes
        self._clock = clock
        self.log = RequestLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(scope, receive, send, self._lifecycle, self._clock())
        context.prefix = self._prefixes.take_off(scope)
        scope[_CONTEXT] = context
        stage_seconds.set(context.stages)
        counted = scope["path"] not in PROBES
        if counted:
            self._metrics.inflight.inc()
        try:
            await self._app(scope, context.receive, context.send)
        except Exception:  # `ProblemMiddleware` has answered it, unless the answer had begun before
            logger.exception("request %s failed", context.request_id)
        finally:
            if counted:
                self._metrics.inflight.dec()
            seconds = self._clock() - context.started
            status = context.status or problems.CLIENT_DISCONNECTED
            answered = Answered(
                *(
                    scope["method"],
                    scope["path"],
                    status,
                    seconds,
                    context.request_id,
                    context.key_name,
                ),
                *(context.client, context.model, context.code, context.measured),
            )
            self.count(answered, context.endpoint)

    def count(self, answered: Answered, route: str | None) -> None:
        """Count and log a request that the route of a path answered; see `RequestContext`."""
        path, status = answered.path, answered.status
        endpoint = path if path in self._endpoints else route or "other"
        refusal = answered.code if status in (429, 503) else None  # there is no room for it now
        self._requests(endpoint, str(status)).inc()
        self._duration(endpoint).observe(answered.seconds)
        if answered.key_name is not None:
            self._key_requests(answered.key_name, str(status)).inc()
        if status == problems.CLIENT_DISCONNECTED:
            self._metrics.cancelled.inc()
        if self._lifecycle.stopping and path not in PROBES:
            self._lifecycle.answered += refusal is None
            self._lifecycle.refused += refusal is not None
        if path in PROBES:
            self.log.answered(logging.DEBUG, answered)
        elif refusal is None or self.log.has_own_line(refusal):
            self.log.answered(logging.INFO, answered)

    def refuse(
        self, error: ServiceError, headers: Iterable[Header]
    ) -> tuple[int, list[Header], bytes]:
        """Count and log a refusal of bytes that are no request, or of a connection; see
        `service.http.Application`.
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
        content = problems.body(problem, request_id)
        own = {
            "content-type": problems.MEDIA_TYPE,
            "content-length": str(len(content)),
            "x-request-id": request_id,
        }
        named = own | {name.lower(): value for name, value in problem.headers.items()}
        return (
            problem.status,
            [(name.encode(), value.encode()) for name, value in named.items()],
            content,
        )


class ProblemMiddleware:
    """Answers what its layers raise with a problem document, and counts it.

    A defect of ours is raised again after its answer, so that it is logged.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, pace: RefusalPace) -> None:
        self._app = app
        self._metrics = metrics
        self._pace = pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        try:
            await self._app(scope, receive, send)
        except ClientDisconnected:
            return  # nobody is left to read an answer
        except Exception as error:
            if scope["type"] != "http" or request_context(scope).status is not None:
                raise
            problem, context = problems.problem_of(error), request_context(scope)
            context.code = problem.code
            # A 503 to a probe is no refusal, but a 401 is.
            if scope["path"] not in PROBES or isinstance(error, Unauthorized):
                self._metrics.rejected.labels(problem.code).inc()
                # Who tries again at once would take the processors from an engine that starts, or
                # is full.
                if isinstance(error, QueueFull | EngineUnavailable):
                    await asyncio.sleep(self._pace.delay(connection_of(scope)))
            if scope["path"].startswith(problems.INFERENCE_PROTOCOL):
                content, kind = json.dumps({"error": problem.detail}).encode(), "application/json"
            else:
                content, kind = problems.body(problem, context.request_id), problems.MEDIA_TYPE
            await Response(content, problem.status, problem.headers, kind)(scope, receive, send)
            if problem.code == problems.INTERNAL_ERROR:
                raise
