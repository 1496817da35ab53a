"""Admission: admit a request if there is room, and hold its model, slots and deadline.

    model = await model_of(request, name)                   the model, held until the answer
    async with admit(request, model) as admitted:           room, a deadline, the disconnect
        picture, query = await read_picture(request, admitted, query)
        await admitted.take_slots(1)                        a slot for each picture
        decoded, result = await infer_file(admitted, picture, requested)

The end of the context gives back the request's slots and the bytes of its body.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from model.outputs import Outputs
from service.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    Draining,
    ModelLoading,
)
from service.http.connection import connection_of
from service.models.residency import UNNAMED
from service.models.version import Lease
from service.web.lanes import Deadline, Lane
from service.web.limiter import CountedBytes, Permit
from service.web.middleware import request_context
from service.web.service import ApplicationState, Service
from service.web.upload import RIGHT_CALLS

T = TypeVar("T")

# Seconds after the deadline in which a picture that was launched in time is still answered.
LATE_SECONDS: Final = 0.5

# A thread converts documents of at least this many values, which would hold the event loop for 5
# to 10 ms.
LARGE: Final = 2000


class Sender(NamedTuple):
    """The sender of a request.

    Attributes:
        caller: name of the API key, or the network of the address without a key; see
            `RequestContext.caller`.
        started: reading of the clock at which the request's headers had been read.
        receive: returns the next part of the body.
        left: done once the caller has disconnected, or a coroutine function that waits for that;
            None if a disconnect cancels the request's task anyway.
        headers: headers of the request.
        request_id: id of the request.
        prefix: prefix of the path; links in the answer begin with it.
    """

    caller: str
    started: float
    receive: Receive
    left: asyncio.Future[None] | Callable[[Receive], Coroutine[Any, Any, None]] | None = None
    headers: Headers = Headers()
    request_id: str = ""
    prefix: str = ""


class Cancellation:
    """Cancels the task of a request when its time is up or its caller disconnects.

    The context manager raises `timeout_error` or `ClientDisconnected` in place of the cancellation.

    Attributes:
        timeout_error: the error of a request whose time is up now.
    """

    _task: asyncio.Task[Any]

    def __init__(self) -> None:
        self.timeout_error: Exception = DeadlineExceeded("the request was not answered in time")
        self._timeout = asyncio.timeout(None)
        self._has_disconnected = False
        self._disconnect: asyncio.Future[None] | None = None
        self._watcher: asyncio.Future[None] | None = None

    def end_in(self, seconds: float) -> None:
        """Cancel the task after some seconds, instead of any time set before."""
        self._timeout.reschedule(asyncio.get_running_loop().time() + seconds)

    def watch(self, sender: Sender) -> None:
        """Cancel the task when its caller disconnects; the body must have been read."""
        if sender.left is None:
            return
        if callable(sender.left):
            self._watcher = asyncio.ensure_future(sender.left(sender.receive))
            self._disconnect = self._watcher
        else:
            self._disconnect = sender.left
        self._disconnect.add_done_callback(self._cancel)

    def _cancel(self, _: object) -> None:
        self._has_disconnected = True
        self._task.cancel()

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a request is a task"
        self._task = task
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._disconnect is not None:
            self._disconnect.remove_done_callback(self._cancel)
        if self._watcher is not None:
            self._watcher.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise self.timeout_error from None
        if isinstance(error, TimeoutError) and self._timeout.expired():
            raise self.timeout_error from None
        if (
            isinstance(error, asyncio.CancelledError)
            and self._has_disconnected
            and self._task.cancelling() <= 1
        ):
            self._task.uncancel()
            raise ClientDisconnected("the caller went away") from None


class AdmittedRequest:
    """A request with its slots, admitted until the context ends.

    The request takes its slots once its body is here. This is a class, because a generator would
    take more of the event loop's time.

    Args:
        model: the model that answers; None if the request does not need a model, or its route sets
            the model later.
        needs_slot: refuse the request at once if every slot is taken.

    Attributes:
        model: the model that answers.
        sender: the sender of the request.
        deadline: the end of the request's time.
        permit: the slots of the request.
        body: counts the bytes of the body.
        cancellation: ends the request.
        loading: lock held while the model of the request is loaded.
        embedding: lock held while texts of the request are computed.
        right_call: how to send a picture to the route, for messages.

    Raises:
        QueueFull, Draining, EngineUnavailable: the service does not have room.
        RequestTimeout: the body did not arrive in time.
        DeadlineExceeded: the request was not answered in time.
        ClientDisconnected: the caller has disconnected.
    """

    model: Lease
    right_call = RIGHT_CALLS

    def __init__(
        self, service: Service, model: Lease | None, sender: Sender, *, needs_slot: bool = True
    ) -> None:
        self.service = service
        self.sender = sender
        self.deadline = deadline_of(service, sender.started)
        self.permit = Permit(service.limiter, sender.caller)
        self.loading = asyncio.Lock()
        self.embedding = asyncio.Lock()
        if model is not None:
            self.model = model
        self._needs_engine = model is not None
        self._needs_slot = needs_slot
        self.cancellation = Cancellation()
        self.body = CountedBytes(sender.caller)

    async def __aenter__(self) -> Self:
        if self._needs_slot:
            await self.service.limiter.wait_for_lenders(caller=self.sender.caller)
            check_room(self.service, self.sender.caller, needs_engine=self._needs_engine)
        await self.cancellation.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self.cancellation.__aexit__(*raised)
        finally:
            self.permit.close()
            self.service.byte_budget.give_back(self.body)

    def with_model(self, model: Lease) -> Self:
        """Return the same request with another model that answers."""
        other = copy.copy(self)
        other.model = model
        return other

    async def take_slots(self, slots: int) -> None:
        """Take a slot for each picture, now that the body is here; raises `QueueFull`.

        From now on the request ends when its caller disconnects.
        """
        await self.service.limiter.wait_for_lenders(slots, self.sender.caller)
        self.permit.extend(slots)
        self.cancellation.end_in(self.deadline.remaining() + LATE_SECONDS)
        self.cancellation.watch(self.sender)

    @asynccontextmanager
    async def turn(self, lane: Lane, size: float = 1) -> AsyncIterator[None]:
        """Wait for a turn in a lane and hold it, and lend a slot to others meanwhile."""
        with self.permit.lent(), lane.turn(self.sender.caller, size, self.deadline) as turn:
            await turn
            yield

    async def on_thread(self, lane: Lane, work: Callable[[], T], size: float = 1) -> T:
        """Return the result of `work` on a thread of a lane; lend a slot to others meanwhile."""
        with (
            self.permit.lent(),
            lane.work(work, self.sender.caller, size, self.deadline) as job,
        ):
            return await job

    async def convert(self, work: Callable[[], T], size: int) -> T:
        """Read or write a document by `work`, on a thread if the document has many values."""
        if size < LARGE:
            return work()
        lane = self.service.lanes.documents
        with lane.work(work, self.sender.caller, size, self.deadline) as job:
            return await job

    def count_image(self, model: str, outputs: Outputs | None = None) -> None:
        """Count a picture that a model answered just now; see `Metrics.count_image`."""
        self.service.metrics.count_image(model, outputs, self.service.clock() - self.sender.started)


def admit(
    request: Request, model: Lease | None = None, *, needs_slot: bool = True
) -> AdmittedRequest:
    """Admit a request over HTTP if there is room; see `AdmittedRequest`."""
    context = request_context(request.scope)
    connection = connection_of(request.scope)
    if model is not None:
        context.model = model.info.name
    if connection is not None:
        connection.caller = context.caller
    sender = Sender(
        caller=context.caller,
        started=context.started,
        receive=request.receive,
        left=_wait_for_disconnect if connection is None else connection.left,
        headers=request.headers,
        request_id=context.request_id,
        prefix=context.prefix or "",
    )
    return AdmittedRequest(service_of(request), model, sender, needs_slot=needs_slot)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def check_open(service: Service, *, needs_engine: bool = True) -> None:
    """Raise `Draining` or `EngineUnavailable` if the service does not take requests."""
    if service.lifecycle.draining:
        raise Draining("the service is about to stop: try another instance")
    if needs_engine and not service.models.default.current.engine.ready:
        service.models.require_ready(service.models.default_name)


def check_room(service: Service, caller: str = "", *, needs_engine: bool = True) -> None:
    """Raise `QueueFull` if a request would not get a slot, without taking one.

    Bodies that have just begun to arrive will take slots. Without counting them, many callers would
    be admitted for each free slot, and most of them refused once their bodies are here. Such bodies
    reserve at most half of the slots, because a caller can begin a body and never end it.

    Raises:
        Draining, EngineUnavailable: as `check_open`.
        ReceivingFull: the caller leaves too many answers unread.
    """
    check_open(service, needs_engine=needs_engine)
    limiter = service.limiter
    limiter.check(caller=caller)
    service.byte_budget.check_unread(caller)
    free = limiter.capacity - limiter.in_use
    if free <= limiter.capacity // 2:
        limiter.check(1 + service.byte_budget.newcomers(free))


# The service and the model of a request


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    state: ApplicationState = request.app.state
    return state.service


async def model_of(request: Request, name: str | None = None, *, share: float = 1.0) -> Lease:
    """Return the model that a request names, or the default; held until the answer is ready.

    Args:
        share: part of the request's time that loading may take.

    Raises as `acquire`.
    """
    service = service_of(request)
    context = request_context(request.scope)
    lease = await acquire(
        service, name, deadline_of(service, context.started, share), context.caller
    )
    context.leases.append(lease)
    return lease


async def use_named_model(request: Request, admitted: AdmittedRequest, name: str | None) -> None:
    """Let another model answer if the form names one; raises as `model_of`."""
    if name is not None and name != admitted.model.info.name:
        admitted.model = await model_of(request, name)
        request_context(request.scope).model = name


def deadline_of(service: Service, started: float, share: float = 1.0) -> Deadline:
    """Return the end of a part of a request's time.

    Args:
        started: reading of the clock at which the request's headers had been read.
        share: the part of the time.
    """
    return Deadline(started + share * service.settings.request_timeout, service.clock)


async def acquire(service: Service, name: str | None, deadline: Deadline, caller: str) -> Lease:
    """Hold a model until its release; load it only if its description is not known yet.

    Raises:
        What `Models.acquire` raises; and if it loads the model, what `waiting_for_model` and
        `Models.load` raise.
    """
    if service.models.needs_load(name):
        async with waiting_for_model(service, name, deadline, caller):
            await service.models.load(name, caller or UNNAMED)
    return service.models.acquire(name)


@asynccontextmanager
async def waiting_for_model(
    service: Service, name: str | None, deadline: Deadline, caller: str
) -> AsyncIterator[None]:
    """Hold a slot while a request waits for a model; such slots are at most a quarter of all.

    Raises:
        ModelLoading: too many requests wait for models, or the time for loading is up.
        QueueFull: every slot is taken.
    """
    with service.limiter.waiting(caller):
        try:
            async with asyncio.timeout(deadline.remaining()):
                yield
        except TimeoutError:
            raise ModelLoading(f"{name!r:.200} was not loaded in the request's time") from None
