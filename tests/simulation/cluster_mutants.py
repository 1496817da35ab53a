"""Faults between workers and engines that the simulator must find: each takes one protection out
of the service's code, as a slip would.

A fault is a function that patches what it is given; its docstring says what is wrong then.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Any

import pytest

from service.cluster import engine_server, protocol, remote_engine
from service.cluster.channel import FrameProtocol
from service.cluster.remote_engine import Balancer
from service.errors import ClientDisconnected
from service.http import watchdog
from service.web import pipeline
from service.web import work as web_work
from tests.simulation import requests
from tests.simulation.transport import SimulatedChannel


def dead_engines_requests_pending(patch: pytest.MonkeyPatch) -> None:
    """When an engine's connection ends, nobody tells those that wait for it."""

    def connection_lost(self: Any, exc: Exception | None) -> None:
        FrameProtocol.connection_lost(self, exc)
        self.lost.set()

    patch.setattr(remote_engine._EngineConnection, "connection_lost", connection_lost)


def outcome_sent_twice(patch: pytest.MonkeyPatch) -> None:
    """The engine's process answers an image that failed a second time."""
    send = engine_server._WorkerConnection.send

    def twice(self: Any, frame: Any) -> None:
        send(self, frame)
        if isinstance(frame, protocol.Failed):
            send(self, frame)

    patch.setattr(engine_server._WorkerConnection, "send", twice)


def cancelled_unanswered(patch: pytest.MonkeyPatch) -> None:
    """An image that was cancelled gets no frame, so its slot never comes back."""
    answer = engine_server._WorkerConnection._answer

    def unless_cancelled(self: Any, id_: int, outcome: Any) -> None:
        if isinstance(outcome, protocol.Cancelled):
            del self._entries[id_]
        else:
            answer(self, id_, outcome)

    patch.setattr(engine_server._WorkerConnection, "_answer", unless_cancelled)


def slot_used_again_at_once(patch: pytest.MonkeyPatch) -> None:
    """A slot is free as soon as its caller leaves, while the engine still reads it."""
    infer = remote_engine._EngineConnection.infer

    async def eager(self: Any, request: Any, timeout: float) -> Any:
        free = list(self._free)
        try:
            return await infer(self, request, timeout)
        except asyncio.CancelledError:
            if free:
                self._free.append(free[-1])
            raise

    patch.setattr(remote_engine._EngineConnection, "infer", eager)


def cancel_not_sent(patch: pytest.MonkeyPatch) -> None:
    """The engine does not hear that a caller left."""
    send = FrameProtocol.send
    patch.setattr(
        FrameProtocol,
        "send",
        lambda self, frame: None if isinstance(frame, protocol.Cancel) else send(self, frame),
    )


def dead_workers_images_computed(patch: pytest.MonkeyPatch) -> None:
    """The images of a worker that was killed stay in the queue."""
    patch.setattr(engine_server._WorkerConnection, "connection_lost", FrameProtocol.connection_lost)


def outstanding_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Images without an outcome are counted up and never down."""
    count = remote_engine._EngineConnection._count

    def only_up(self: Any) -> None:
        cell = self._channel.counters.outstanding
        before = int(cell[self._worker, self._channel.index])
        count(self)
        cell[self._worker, self._channel.index] = max(before, len(self._pending))

    patch.setattr(remote_engine._EngineConnection, "_count", only_up)


def cut_frame_accepted(patch: pytest.MonkeyPatch) -> None:
    """A frame is read as soon as its length is there."""

    def feed(self: Any, data: bytes) -> Any:
        if len(self._buffer) + len(data) > 4:
            length = int.from_bytes((self._buffer + data)[:4], "little")
            data = data + bytes(max(0, length + 4 - len(self._buffer) - len(data)))
        return original(self, data)

    original = protocol.FrameReader.feed
    patch.setattr(protocol.FrameReader, "feed", feed)


def rest_of_a_read_dropped(patch: pytest.MonkeyPatch) -> None:
    """What follows the last whole frame of a read is thrown away."""

    def feed(self: Any, data: bytes) -> Any:
        yield from original(self, data)
        self._buffer.clear()

    original = protocol.FrameReader.feed
    patch.setattr(protocol.FrameReader, "feed", feed)


def strangers_served(patch: pytest.MonkeyPatch) -> None:
    """A connection need not say which worker it is from."""
    received = engine_server._WorkerConnection.frame_received

    def trusting(self: Any, frame: Any) -> None:
        if self._worker is None and not isinstance(frame, protocol.Hello):
            self._worker = 0
        received(self, frame)

    patch.setattr(engine_server._WorkerConnection, "frame_received", trusting)


def keys_unchecked(patch: pytest.MonkeyPatch) -> None:
    """Whoever says that it is a worker is believed."""
    patch.setattr(hmac, "compare_digest", lambda one, other: True)


def frames_without_bound(patch: pytest.MonkeyPatch) -> None:
    """A worker may announce a frame of any length."""
    patch.setattr(protocol, "REQUEST_LIMIT", 1 << 32)


def model_after_ready(patch: pytest.MonkeyPatch) -> None:
    """A worker hears that the engine is ready and never of its model."""
    send = FrameProtocol.send
    patch.setattr(
        FrameProtocol,
        "send",
        lambda self, frame: None if isinstance(frame, protocol.ModelLoaded) else send(self, frame),
    )


def never_connected_again(patch: pytest.MonkeyPatch) -> None:
    """A worker that could not connect does not try again."""

    def connect(self: Any) -> Any:
        try:
            return original(self)
        except BlockingIOError:
            raise asyncio.CancelledError from None

    original = SimulatedChannel.connect
    patch.setattr(SimulatedChannel, "connect", connect)


def lost_engine_still_ready(patch: pytest.MonkeyPatch) -> None:
    """A worker goes on to send images to an engine that is no more."""
    patch.setattr(remote_engine.RemoteEngine, "ready", property(lambda self: self.info is not None))


def balancer_ignores_readiness(patch: pytest.MonkeyPatch) -> None:
    """The balancer sends images to engines that are not ready."""
    patch.setattr(Balancer, "_least_loaded", lambda self: min(self.engines, key=lambda engine: engine.outstanding))


def caller_not_watched(patch: pytest.MonkeyPatch) -> None:
    """The pipeline leaves a cancelled request's work running."""

    async def until_one_is_done(receive: Any, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(web_work._disconnect(receive))
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        watcher.cancel()
        if task.done():
            return task.result()
        raise ClientDisconnected("the caller went away")

    patch.setattr(requests, "unless_disconnected", until_one_is_done)


def answers_lost_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """The connections of an engine that ends drop the answers of the batches that it still computes."""
    close = engine_server.EngineServer.close

    async def silent(self: Any) -> None:
        for connection in self.connections:
            connection.send = lambda frame: None
        await close(self)

    patch.setattr(engine_server.EngineServer, "close", silent)


def frozen_processes_left_alone(patch: pytest.MonkeyPatch) -> None:
    """Nobody notices that a process stands still."""
    patch.setattr(watchdog.Pulse, "is_frozen", lambda *arguments, **options: False)


def frozen_engines_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A worker waits for its engine's answer as long as that takes."""
    patch.setattr(pipeline, "_LATE_SECONDS", 60.0)


def working_processes_taken_for_frozen(patch: pytest.MonkeyPatch) -> None:
    """A process is given less time between two beats than they take."""
    patch.setattr(watchdog, "_FROZEN_SECONDS", 0.0)


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    mutant for mutant in list(globals().values()) if getattr(mutant, "__module__", "") == __name__ and callable(mutant)
]
