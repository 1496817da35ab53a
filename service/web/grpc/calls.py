"""The way of a call: what `service.web.middleware` and `service.web.api_keys` are to a request over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager, nullcontext
from http import HTTPStatus
from typing import Any, Final

import grpc
from starlette.types import Message

from service.errors import DeadlineExceeded, MalformedRequest, RequestTimeout, UploadTooLarge
from service.web.admission import RECEIVING_BYTES
from service.web.api_keys import KeyGuard
from service.web.inference_protocol import GRPC_SERVICE
from service.web.lanes import Deadline, Lane
from service.web.middleware import PROBES, hold_back, request_id_from
from service.web.problems import CLIENT_DISCONNECTED, INTERNAL_ERROR, Problem, problem_of, refusal_of
from service.web.request import Service
from service.web.request_log import Answered

logger = logging.getLogger(__name__)

STATUS_CODES: Final = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    # As the library itself says of a message that is too large.
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNPROCESSABLE_ENTITY: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.INTERNAL_SERVER_ERROR: grpc.StatusCode.INTERNAL,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The status code of each status that `service.web.problems` gives to an error of a call."""

_MAX_QUESTION_BYTES: Final = 64 << 10
"""Bytes of a message with a question about the server or a model."""

_GRACE_SECONDS: Final = 1.0
"""Time in which a message must arrive once others wait."""

_FEWEST_ARRIVALS: Final = 8

Count = Callable[..., None]
"""`RequestContextMiddleware.count`."""


class Call:
    """A call whose message is still to come, from a `caller`: the name of its key, or else its address."""

    def __init__(self, context: Any, arrivals: Lane, service: Service) -> None:
        self.started = service.clock()
        self.deadline = Deadline(self.started + service.settings.request_timeout, service.clock)
        # Of repeated headers the first counts.
        self.metadata: dict[str, str | bytes] = dict(reversed(context.invocation_metadata()))
        self.request_id = request_id_from(str(self.metadata.get("x-request-id", "")))
        self.caller: Hashable = context.peer().rpartition(":")[0]  # without the port
        self._context = context
        self._arrivals = arrivals

    async def receive(self) -> Message:
        """Return the message, in the form of an ASGI request's body; raises `MalformedRequest` if there is none."""
        data = await self._context.read()
        if data is grpc.aio.EOF:
            raise MalformedRequest("the call has no message")
        return {"type": "http.request", "body": data, "more_body": False}

    @asynccontextmanager
    async def arrival(self) -> AsyncIterator[None]:
        """Wait until the message may arrive; it does while the context lasts.

        The library holds the bytes of a message until it is whole, and does not count them. So few messages arrive at
        the same time. One that takes longer than a second gives way when others wait.

        Raises:
            QueueFull, RequestTimeout: others are read for all of the request's time; or it came too slowly.
        """
        with self._arrivals.turn(self.caller, 1, self.deadline) as turn:
            try:
                await turn
            except DeadlineExceeded:
                raise RequestTimeout("other messages were read for all of the request's time") from None
            try:
                async with asyncio.timeout(self.deadline.remaining()) as limit:
                    patience = asyncio.create_task(self._give_way(limit))
                    try:
                        yield
                    finally:
                        patience.cancel()
            except TimeoutError:
                if not limit.expired():
                    raise
                raise RequestTimeout("the message did not arrive in time") from None

    async def _give_way(self, limit: asyncio.Timeout) -> None:
        """End the arrival after its grace, as soon as other messages wait."""
        await asyncio.sleep(_GRACE_SECONDS)
        while not self._arrivals.waiting:
            await asyncio.sleep(_GRACE_SECONDS / 16)
        limit.reschedule(asyncio.get_running_loop().time())

    async def question(self) -> bytes:
        """Return a message with a question about the server or a model; raises `UploadTooLarge`, and as `arrival`."""
        async with self.arrival():
            data: bytes = (await self.receive())["body"]
        if len(data) > _MAX_QUESTION_BYTES:
            raise UploadTooLarge(f"{len(data)} bytes: at most {_MAX_QUESTION_BYTES} are allowed")
        return data


Method = Callable[[Service, Call], Awaitable[bytes]]
"""Returns the encoded answer to a call."""


class Calls:
    """Answers calls: gives each its id, checks its key, counts and logs it, and answers errors by status codes."""

    def __init__(self, service: Service, guard: KeyGuard, count: Count) -> None:
        self._service = service
        self._guard = guard
        self._count = count
        settings = service.settings
        # As many as largest bodies fit into this worker's part of the bytes to be received.
        most = max(_FEWEST_ARRIVALS, RECEIVING_BYTES // settings.max_request_bytes // settings.workers)
        self._arrivals = Lane("messages", lambda: most, clock=service.clock)

    def handler(self, name: str, method: Method, *, public: bool) -> grpc.RpcMethodHandler:
        """Return what grpcio calls for a method, which needs no key if it is `public`.

        On the wire a single message is the same as a stream of messages with one element. grpcio reads a stream when
        the method does, so that a call is refused before its message arrives.
        """
        path = f"/{GRPC_SERVICE}/{name}"

        async def handle(_: object, context: Any) -> bytes:
            return await self._answer(path, method, context, public=public)

        return grpc.stream_unary_rpc_method_handler(handle)

    async def _answer(self, path: str, method: Method, context: Any, *, public: bool) -> bytes:
        metrics = self._service.metrics
        call = Call(context, self._arrivals, self._service)
        trailers = [("x-request-id", call.request_id)]
        status, name, refusal = CLIENT_DISCONNECTED, None, None
        counted = path not in PROBES
        if counted:
            metrics.inflight.inc()
        try:
            key = None if public else self._guard.find(str(call.metadata.get("authorization", "")))
            if key is not None:
                name = call.caller = self._guard.name(key)
            with self._guard.request(key) if key is not None else nullcontext():
                answer = await method(self._service, call)
            context.set_trailing_metadata(trailers)
            status = HTTPStatus.OK
            return answer
        except Exception as error:
            problem = problem_of(error)
            if problem.code == INTERNAL_ERROR:
                logger.exception("request %s failed", call.request_id)
            metrics.rejected.labels(problem.code).inc()
            await hold_back(error)
            status, refusal = problem.status, refusal_of(problem)
            return await _refuse(context, problem, trailers)
        finally:
            if counted:
                metrics.inflight.dec()
            seconds = self._service.clock() - call.started
            self._count(Answered("gRPC", path, status, seconds, call.request_id, name), path, refusal=refusal)


async def _refuse(context: Any, problem: Problem, trailers: list[tuple[str, str]]) -> bytes:
    seconds = problem.headers.get("Retry-After")
    if seconds is not None:  # https://github.com/grpc/proposal/blob/master/A6-client-retries.md#pushback
        trailers = [*trailers, ("grpc-retry-pushback-ms", f"{seconds}000")]
    await context.abort(STATUS_CODES[HTTPStatus(problem.status)], problem.detail, tuple(trailers))
    raise AssertionError("a call that was ended goes on")
