"""What the processes of a service are to the supervisor: how each is stopped, and what is left of it."""

from __future__ import annotations

import gc
import logging
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.cluster import run
from service.cluster.engine_process import STOP
from service.cluster.run import Ticker, engine_child, worker_child
from service.cluster.shared_memory import SharedCounters
from service.cluster.shared_resources import SharedResources
from service.cluster.supervisor import Supervisor
from service.cluster.swap import Swap
from service.engine.messages import ModelInfo
from service.lifecycle import Terminal
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


def watch(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """Let `run_web` or `run_engine` return 5 at once; return the arguments that it is called with."""
    calls: list[tuple[Any, ...]] = []

    def called(*arguments: Any, **options: Any) -> int:
        calls.append((*arguments, *options.values()))
        return 5

    monkeypatch.setattr(run, name, called)
    return calls


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str]]:
    """Where processes count, and under which names; this one goes on as before."""
    calls: list[tuple[Path, str]] = []
    monkeypatch.setattr(run, "count_in_files", lambda *arguments: calls.append(arguments))
    return calls


def test_a_worker_closes_the_others_listeners_and_counts_under_its_own_name(
    settings: Settings, shared: SharedResources, counted: list[tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, "run_web")
    assert worker_child(settings, shared, 1).main() == 5
    assert [listener.fileno() == -1 for listener in shared.listeners] == [True, False]
    assert counted == [(shared.metrics.folder, "worker-1")]
    [(*arguments, metrics)] = calls
    assert arguments == [settings, shared, 1]
    assert metrics._folder == shared.metrics.folder


def test_an_engine_closes_all_listeners_and_gets_its_own_device(
    settings: Settings, shared: SharedResources, counted: list[tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, "run_engine")

    def load(_: Settings) -> tuple[FakePredictor, ModelInfo]:
        return FakePredictor(), model_info()

    shared.channels[1].change_option("max_batch", 32)  # by its predecessor
    shared.channels[1].change_option("compile", "no-graphs")
    assert engine_child(settings, shared, 1, load).main() == 5
    assert not shared.listening
    assert counted == [(shared.metrics.folder, "engine-1")]
    [(own, *arguments, metrics, load_timeout)] = calls
    assert load_timeout is None
    assert own == settings.model_copy(update={"device": "cuda:1", "max_batch": 32, "compile": "no-graphs"})
    assert arguments == [shared.channels[1], load]
    assert metrics._folder == shared.metrics.folder


@pytest.mark.usefixtures("counted")
def test_an_engine_beside_one_that_serves_has_a_time_limit(
    settings: Settings, shared: SharedResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, "run_engine")
    for group in (0, 1):
        engine_child(settings, shared, 0, lambda _: (FakePredictor(), model_info()), group).main()
    shared.board.take_over()
    engine_child(settings, shared, 0, lambda _: (FakePredictor(), model_info()), 1).main()
    assert [arguments[-1] for arguments in calls] == [None, settings.load_timeout, None]


def test_a_service_is_a_supervisor_of_all_its_processes_and_leaves_nothing_behind(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    frozen: list[bool] = []
    seen: list[list[str]] = []

    class Watched(Supervisor):
        def run(self) -> int:
            seen.extend([child.name for child in children] for children in (self._workers, self._engines))
            assert frozen == [True]
            assert self._drain_timeout == settings.drain_timeout
            assert list(tmp_path.iterdir()) != []
            return 6

    monkeypatch.setattr(run, "Supervisor", Watched)
    monkeypatch.setattr(run, "OperatingSystem", FakeSystem)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    assert run.run_cluster(settings, lambda _: (FakePredictor(), model_info())) == 6
    engines = ["engine cuda:0", "engine cuda:1"]
    assert seen == [["worker 0", "worker 1"], engines * 2]  # those that a swap starts have the same names
    assert list(tmp_path.iterdir()) == []


def test_engines_whose_device_is_not_chosen_yet_are_not_named_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = load_settings({"workers": 2, "device": "auto"})
    shared = SharedResources(settings)
    names = [
        engine_child(settings, shared, 0, lambda _: (FakePredictor(), model_info()), group).name for group in range(2)
    ]
    shared.close()
    assert names == ["engine", "engine"]


def test_a_hang_up_loads_the_checkpoint_again(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reloads: list[str] = []
    terminal = Terminal([])

    class Watched(Supervisor):
        def run(self) -> int:
            assert self._on_hang_up() is True
            return 0

    monkeypatch.setattr(run, "Supervisor", Watched)
    monkeypatch.setattr(run, "OperatingSystem", FakeSystem)
    monkeypatch.setattr(run, "Terminal", lambda: terminal)
    monkeypatch.setattr(Swap, "reload", lambda _: reloads.append("again"))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    run.run_cluster(settings, lambda _: (FakePredictor(), model_info()))
    assert reloads == ["again"]
