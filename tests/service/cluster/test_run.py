"""What the processes of a service are to the supervisor: how each is stopped, and what is left of it."""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cluster.engine_process import STOP
from service.cluster.run import Ticker, engine_child, worker_child
from service.cluster.shared_memory import SharedCounters
from service.cluster.shared_resources import SharedResources
from service.cluster.supervisor import Supervisor
from service.settings import Settings, load_settings
from tests.service.cluster.fake_system import FakeSystem
from tests.service.fakes import FakePredictor, model_info


@pytest.fixture
def settings() -> Settings:
    return load_settings({"workers": 2, "port": 0, "device": "cuda:0,cuda:1"})


@pytest.fixture
def shared(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedResources]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = SharedResources(settings)
    yield shared
    shared.close()


def be_ready(counters: SharedCounters) -> None:
    counters.worker_state[:] = SharedCounters.SERVING
    counters.engine_ready[:] = 1


def test_what_dead_processes_had_is_free_and_their_restarts_are_counted(
    settings: Settings, shared: SharedResources
) -> None:
    counters, system = shared.counters, FakeSystem()
    be_ready(counters)
    counters.permits_taken[:] = 3
    counters.outstanding[:] = 2
    counters.queue_depth[:] = 4
    seen: list[list[list[int]]] = []

    def look() -> list[int]:
        workers = (counters.permits_taken, counters.worker_state, counters.outstanding.sum(axis=1))
        engines = (counters.queue_depth, counters.engine_ready, counters.restarts)
        seen.append([cell.tolist() for cell in workers + engines])
        return []

    system.end_at(1, "worker 1", -9)
    system.at(2, look)
    system.end_at(3, "engine cuda:0", -9)
    system.at(4, look)
    system.signal_at(5, signal.SIGTERM)
    supervisor = Supervisor(
        [worker_child(settings, shared, index) for index in (0, 1)],
        [engine_child(settings, shared, index, lambda _: (FakePredictor(), model_info())) for index in (0, 1)],
        system,
        drain_timeout=settings.drain_timeout,
        on_tick=Ticker(settings, shared, system.now),
        on_drain=shared.stop_listening,
    )
    assert supervisor.run() == 0
    assert seen == [
        [[3, 0], [SharedCounters.SERVING, 0], [4, 0], [4, 4], [1, 1], [0, 0]],
        [[3, 0], [SharedCounters.SERVING, 0], [4, 0], [0, 4], [0, 1], [1, 0]],
    ]
    assert {name: number for _, name, number in system.sent} == {
        "worker 0": signal.SIGTERM,
        "worker 1": signal.SIGTERM,
        "engine cuda:0": STOP,
        "engine cuda:1": STOP,
    }
    assert all(listener.fileno() == -1 for listener in shared.listeners)
    assert counters.seconds[0] == 5


def test_each_child_is_watched_by_its_own_heartbeat(settings: Settings, shared: SharedResources) -> None:
    shared.counters.worker_beats[:] = 1, 2
    shared.counters.engine_beats[:] = 3, 4
    workers = [worker_child(settings, shared, index) for index in (0, 1)]
    engines = [engine_child(settings, shared, index, lambda _: (FakePredictor(), model_info())) for index in (0, 1)]
    assert [child.beats() for child in (*workers, *engines)] == [1, 2, 3, 4]


def test_the_address_is_logged_once_when_all_are_ready(
    settings: Settings, shared: SharedResources, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = 50.0
    tick = Ticker(settings, shared, lambda: now)
    tick()
    shared.counters.engine_ready[:] = 1
    tick()
    assert caplog.messages == []
    be_ready(shared.counters)
    now = 53.9
    tick()
    tick()
    assert [f"127.0.0.1:{shared.port}" in message for message in caplog.messages] == [True, True]
    assert shared.counters.seconds[0] == 3


def test_what_becomes_ready_only_while_draining_is_not_announced(
    settings: Settings, shared: SharedResources, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tick = Ticker(settings, shared, lambda: 0.0)
    shared.stop_listening()
    be_ready(shared.counters)
    tick()
    assert caplog.messages == []
