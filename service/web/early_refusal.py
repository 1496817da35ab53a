"""Refusals from a request's head alone, while every place in the service is taken.

The way through the application (a task, the middleware, the route) costs several times as much as the refusal at its
end, and under overload most requests are refused. So a head that was refused there, because the service was full, is
remembered; one that says the same is refused here, with the same answer, metrics and log line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from starlette.types import Scope

from service.errors import QueueFull, ServiceError
from service.metrics.metrics import Metrics
from service.web.problems import INFERENCE_PROTOCOL, Problem, problem_of
from service.web.refusal_pace import LONGEST_PAUSE, RefusalPace

if TYPE_CHECKING:
    from service.tracing.request_spans import RequestTrace, RequestTracer

Headers = Iterable[tuple[bytes, bytes]]
Key = tuple[str, bytes, tuple[bytes, ...]]
"""Everything that a head is judged by before the service's room: method, target and key."""

_MOST_KEYS = 256
_LONGEST_HEAD = 2048


class KnownHead(NamedTuple):
    """What is known of a head: its path, and the name of its API key."""

    path: str
    key_name: str | None


class Count(Protocol):
    """See `RequestContextMiddleware.count`."""

    def __call__(  # noqa: D102
        self,
        method: str,
        path: str,
        status: int,
        seconds: float,
        request_id: str,
        key_name: str | None,
        *,
        refusal: str | None,
        trace: RequestTrace | None,
    ) -> None: ...


class RefusedHeads:
    """Heads of uploads with which everything was right but the moment, and their paths; the number is bounded."""

    def __init__(self) -> None:
        self._known: dict[Key, KnownHead] = {}

    def remember(self, scope: Scope, key_name: str | None) -> None:
        """Keep the head of a request, with the name of its API key, that was refused because the service was full."""
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        key = _key(scope["method"], target, scope["headers"])
        if (
            key is None
            or len(target) + sum(map(len, key[2])) > _LONGEST_HEAD
            or scope["path"].startswith(INFERENCE_PROTOCOL)
        ):
            return  # the protocol's errors are of another form
        if len(self._known) >= _MOST_KEYS:
            self._known.clear()
        self._known[key] = KnownHead(scope["path"], key_name)

    def find(self, method: str, target: bytes, headers: Headers) -> KnownHead | None:
        """Return what is known of a head."""
        key = _key(method, target, headers)
        return None if key is None else self._known.get(key)


class EarlyRefusal:
    """Refuses heads that are known, while the service is full.

    Args:
        check_room: raises what the application would raise at a request that needs one place.
        count: see `RequestContextMiddleware.count`.
        tracer: makes the spans of requests; None if nobody asked for them.
        longest_pause: seconds for which a caller that is refused again and again is not read.

    Attributes:
        pace: how often callers are refused.
    """

    def __init__(
        self,
        heads: RefusedHeads,
        check_room: Callable[[], None],
        count: Count,
        metrics: Metrics,
        tracer: RequestTracer | None = None,
        *,
        longest_pause: float = LONGEST_PAUSE,
    ) -> None:
        self._heads = heads
        self._check_room = check_room
        self._count = count
        self._rejected = lru_cache(maxsize=8)(metrics.rejected.labels)  # which takes a lock
        self.pace = RefusalPace(longest_pause)
        self._tracer = tracer

    def __call__(self, method: str, target: bytes, headers: Headers, request_id: str) -> Problem | None:
        """Return the refusal of a request, which is counted; None if it has to go through the application."""
        known = self._heads.find(method, target, headers)
        if known is None:
            return None
        try:
            self._check_room()
        except QueueFull as error:
            problem = problem_of(error)
            self._rejected(problem.code).inc()
            trace = None
            if self._tracer is not None:
                trace = self._tracer.begin(_scope(method, known.path, target, headers))
                trace.error_type = problem.code
            self._count(
                method, known.path, problem.status, 0.0, request_id, known.key_name, refusal=problem.code, trace=trace
            )
            return problem
        except ServiceError:
            pass  # answered by the application, in its own time
        return None


def _key(method: str, target: bytes, headers: Headers) -> Key | None:
    """Return by what a head is judged; None if its answer depends on more, as those to web pages of other origins."""
    credentials: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            credentials.append(value)
        elif name == b"origin":
            return None
    return method, target, tuple(credentials)


def _scope(method: str, path: str, target: bytes, headers: Headers) -> Scope:
    """Return as much of an ASGI scope as a span tells."""
    query = target.partition(b"?")[2]
    parts = {"method": method, "path": path, "query_string": query, "headers": [*headers]}
    return {**parts, "scheme": "http", "http_version": "1.1"}
