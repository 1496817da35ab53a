"""What a web worker is put together from, and what it tells the service's other processes. No server runs here."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.images.preprocess import ModelInput
from model.images.region import Region
from service.cluster import worker
from service.cluster.remote_engine import Balancer, RemoteEngine
from service.cluster.shared_memory import SharedCounters
from service.cluster.shared_resources import SharedResources
from service.cluster.swap_board import CHANGED
from service.errors import QueueFull, TooManyRequests
from service.observe.metrics import Metrics
from service.settings import Settings, load_settings
from tests.service.fakes import model_info, on_a_loop

LIMITS = {
    "queue_size": 3,
    "max_receiving_bytes": 4 << 20,
    "max_request_bytes": 1 << 20,
    "max_upload_bytes": 1 << 20,
    "api_keys": "one,two",
    "key_max_requests": 4,
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared: list[SharedResources] = []

    def make(index: int = 0, **changes: Any) -> Worker:
        settings = load_settings({"workers": 2, "port": 0} | LIMITS | changes)
        shared.append(SharedResources(settings))
        return Worker(settings, shared[-1], index, monkeypatch)

    yield make
    for each in shared:
        each.close()


class Worker:
    """A web worker whose server is only watched: what `run_web` made, and whom it woke."""

    def __init__(
        self, settings: Settings, shared: SharedResources, index: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.counters = shared.counters
        self.shared = shared
        self.woken: list[tuple[int, int]] = []
        self.state_before_serving = 0
        self.served: Any = None
        self.settled = 0
        self.ignored: list[tuple[int, object]] = []

        def ignore(number: int, action: object) -> None:
            assert not shared.counters.worker_state[index]  # the supervisor may send it from then on
            self.ignored.append((number, action))

        def create_app(*arguments: Any) -> None:
            self.arguments = arguments

        def run(server: worker.WorkerServer, sockets: Any) -> None:
            self.server, self.served = server, sockets
            self.state_before_serving = int(shared.counters.worker_state[index])
            server._lifecycle.exit_code = 7

        def freeze() -> None:
            self.settled += 1

        monkeypatch.setattr(worker, "create_app", create_app)
        monkeypatch.setattr(worker, "freeze_objects", freeze)
        monkeypatch.setattr(worker.WorkerServer, "run", run)
        monkeypatch.setattr(os, "kill", lambda pid, number: self.woken.append((pid, number)))
        with monkeypatch.context() as running:
            running.setattr(signal, "signal", ignore)
            self.exit_code = worker.run_web(settings, shared, index, Metrics())
        _, self.engine, _, self.lifecycle, self.engine_changed, self.limiter, self.store, *limits = self.arguments
        self.budget, self.key_limiter = limits

    def becomes(self, state: str) -> None:
        """The engine has another state."""
        for engine in self.engine.current.engine.engines:
            engine.info = model_info()
            engine._status = replace(engine._status, state=state)
        self.engine_changed()


def test_a_worker_serves_its_own_socket_and_returns_the_exit_code(made: Callable[..., Worker]) -> None:
    one = made(1)
    assert one.served == [one.shared.listeners[1]]
    assert one.exit_code == 7
    assert one.state_before_serving == SharedCounters.LISTENING
    assert one.ignored == [(CHANGED, signal.SIG_IGN)]
    assert one.counters.worker_state.tolist() == [0, SharedCounters.LISTENING]


def test_the_supervisor_hears_when_a_worker_begins_to_serve_and_when_it_ceases(made: Callable[..., Worker]) -> None:
    one = made(1)
    assert one.woken == []
    one.becomes("ready")
    assert one.counters.worker_state.tolist() == [0, SharedCounters.SERVING]
    assert one.settled == 1
    one.becomes("failed")
    assert one.counters.worker_state.tolist() == [0, SharedCounters.LISTENING]
    assert one.woken == [(os.getpid(), CHANGED)] * 2
    assert one.settled == 1


@pytest.mark.parametrize(("index", "lines"), [(0, 1), (1, 0)])
def test_the_first_worker_alone_logs_the_model(
    made: Callable[..., Worker], index: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = made(index)
    one.becomes("loading")
    assert caplog.messages == []
    one.becomes("ready")
    assert len([message for message in caplog.messages if "fake from nowhere on cpu" in message]) == lines


@pytest.mark.parametrize(("device", "kind"), [("cpu", RemoteEngine), ("cuda:0,cuda:1", Balancer)])
def test_one_device_is_asked_directly_and_several_through_a_balancer(
    made: Callable[..., Worker], device: str, kind: type
) -> None:
    assert [type(generation.engine) for generation in made(device=device).engine._groups] == [kind, kind]


def test_limits_are_those_of_the_settings_over_all_workers(made: Callable[..., Worker]) -> None:
    one = made(1)
    one.counters.permits_taken[0] = 2
    one.limiter.acquire()
    with pytest.raises(QueueFull):
        one.limiter.acquire()
    assert one.counters.permits_taken.tolist() == [2, 1]
    one.counters.received_bytes[0] = 3 << 20
    assert one.budget.take(1 << 20)
    assert not one.budget.take(1)
    assert one.counters.received_bytes.tolist() == [3 << 20, 1 << 20]
    one.counters.key_requests[0] = (1, 4)
    one.key_limiter.acquire(0)
    with pytest.raises(TooManyRequests):
        one.key_limiter.acquire(1)
    assert one.counters.key_requests.tolist() == [[1, 4], [1, 0]]


def test_pictures_are_kept_by_the_clock_and_within_the_bytes_of_the_settings(made: Callable[..., Worker]) -> None:
    one = made(recent_ttl=5, recent_bytes=2 * 4096)
    picture = ModelInput(np.zeros((8, 8, 3), np.uint8), Region(0, 0, 8, 8))
    kept = [one.store.put(picture) for _ in range(3)]
    assert [one.store.get(each) is not None for each in kept] == [False, True, True]
    one.counters.seconds[0] = 4
    assert one.store.get(kept[2]) is not None
    one.counters.seconds[0] = 5
    assert one.store.get(kept[2]) is None


@on_a_loop
async def test_its_event_loop_beats_in_a_cell_of_its_own_and_heeds_news_of_a_swap(
    made: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(1)
    heeded: list[tuple[object, ...]] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", lambda *what: heeded.append(what))
    beating = asyncio.create_task(one.server._beside())  # type: ignore[misc]
    await asyncio.sleep(0)
    assert one.counters.worker_beats.tolist() == [0, 1]
    assert heeded == [(CHANGED, one.engine.adopt)]
    beating.cancel()
    with suppress(asyncio.CancelledError):
        await beating


@on_a_loop
async def test_a_second_signal_leaves_a_worker_draining(
    made: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor repeats what it is sent; it kills by itself who drains for too long."""
    server = made(drain_delay=0).server
    monkeypatch.setattr("service.http.server.exit_now", pytest.fail)
    server._on_signal(signal.SIGHUP)  # a terminal sends it to all, and the supervisor knows what it means
    assert not server._lifecycle.draining
    for _ in range(2):
        server._on_signal(signal.SIGTERM)
    assert server._lifecycle.draining
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert server.should_exit
