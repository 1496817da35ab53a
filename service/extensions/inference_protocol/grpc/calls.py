"""The path of a call, like `service.web.middleware` for a request: key, metrics, log, errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar

import grpc

from service.errors import ModelFailed
from service.extensions.inference_protocol import GRPC_PROBES
from service.extensions.inference_protocol.grpc.call import Call
from service.extensions.inference_protocol.grpc.methods import METHODS, STREAMS, WATCH
from service.web.api_keys import KeyGuard
from service.web.lanes import Lane
from service.web.limiter import RECEIVING_BYTES
from service.web.middleware import Answered
from service.web.problems import CLIENT_DISCONNECTED, INTERNAL_ERROR, problem_of
from service.web.refusal_pace import RefusalPace
from service.web.service import Service

logger = logging.getLogger(__name__)

# grpcio logs each answer that it could not send after a disconnect, so clients could fill the log.
logging.getLogger("grpc").setLevel(logging.CRITICAL)

STATUS_CODES: Final = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    # grpcio uses the same code for a message that is too large.
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.MISDIRECTED_REQUEST: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.UNPROCESSABLE_ENTITY: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.INTERNAL_SERVER_ERROR: grpc.StatusCode.INTERNAL,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""gRPC's status code for each status in `service.web.problems`."""

ARRIVALS_PER_CALLER: Final = 2
"""Messages of one caller that may arrive at once, so that a silent caller blocks few turns."""

_MIN_ARRIVALS: Final = 8

REFUSALS_PER_SECOND: Final = 100
"""Further refusals wait, because each takes a millisecond of the event loop."""

_WATCHES: Final = 64
"""Calls that may watch the health at once."""

_WATCHES_PER_CALLER: Final = 8

_REFLECTIONS: Final = 8
"""Calls that may ask for services at once."""

T = TypeVar("T")

Count = Callable[..., None]
"""See `RequestContextMiddleware.count`."""


class Calls:
    """Answers calls: checks the key, counts and logs the call, turns errors into status codes."""

    def __init__(self, service: Service, guard: KeyGuard, count: Count) -> None:
        self._service = service
        self._guard = guard
        self._count = count
        settings = service.settings
        # This worker's share of the receive buffers fits this many bodies of the largest size.
        arrivals = max(
            _MIN_ARRIVALS, RECEIVING_BYTES // settings.max_request_bytes // settings.workers
        )
        lane = partial(Lane, clock=service.clock)
        reflections = lane("reflection", lambda: _REFLECTIONS, per_caller=ARRIVALS_PER_CALLER)
        self._streams = dict.fromkeys(STREAMS, reflections)
        self._streams[WATCH] = lane("watchers", lambda: _WATCHES, per_caller=_WATCHES_PER_CALLER)
        self._arrivals = lane("messages", lambda: arrivals, per_caller=ARRIVALS_PER_CALLER)
        self._pace = RefusalPace(service.clock, REFUSALS_PER_SECOND)

    async def answer(self, path: str, _: object, context: Any) -> bytes:
        """Answer a call with one message; the signature is grpcio's."""
        return await self._handled(path, context, partial(METHODS[path], self._service))

    async def converse(self, path: str, _: object, context: Any) -> None:
        """Answer a call with a stream of messages, in a turn of its lane; see `answer`."""

        async def work(call: Call) -> None:
            with self._streams[path].turn(call.caller, 1, call.deadline) as turn:
                await turn
                await STREAMS[path](self._service, call)

        await self._handled(path, context, work)

    async def _handled(self, path: str, context: Any, work: Callable[[Call], Awaitable[T]]) -> T:
        metrics = self._service.metrics
        call = Call(context, self._arrivals, self._service)
        client = call.address
        trailers = [("x-request-id", call.request_id)]
        status = CLIENT_DISCONNECTED
        name: str | None = None
        code: str | None = None
        with nullcontext() if path in GRPC_PROBES else metrics.inflight.track_inprogress():
            try:
                key = None
                if path not in GRPC_PROBES:
                    key = self._guard.find(str(call.metadata.get("authorization", "")))
                if key is not None:
                    name = key.name
                    call.caller = key.name
                with self._guard.request(key):
                    answer = await work(call)
                context.set_trailing_metadata(trailers)
                status = HTTPStatus.OK
                return answer
            except Exception as error:
                problem = problem_of(error)
                if problem.code == INTERNAL_ERROR:
                    logger.exception("request %s failed", call.request_id)
                metrics.rejected.labels(problem.code).inc()
                status = problem.status
                code = problem.code
                seconds = problem.headers.get("Retry-After")
                if seconds is not None:
                    # https://github.com/grpc/proposal/blob/master/A6-client-retries.md#pushback
                    trailers.append(("grpc-retry-pushback-ms", f"{seconds}000"))
                await asyncio.sleep(self._pace.delay(None))
                grpc_code = STATUS_CODES[HTTPStatus(status)]
                if isinstance(error, ModelFailed):  # clients would retry after UNAVAILABLE
                    grpc_code = grpc.StatusCode.FAILED_PRECONDITION
                await context.abort(grpc_code, problem.detail, tuple(trailers))
                raise AssertionError("`abort` returned") from error
            finally:
                seconds_taken = self._service.clock() - call.started
                answered = Answered(
                    "gRPC", path, call.request_id, status, seconds_taken, name, client, code=code
                )
                self._count(answered, path)
