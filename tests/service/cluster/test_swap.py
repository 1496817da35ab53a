"""The supervisor's part in a swap, without processes and without waiting."""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from service.cluster.shared_memory import SharedCounters
from service.cluster.shared_resources import SharedResources
from service.cluster.supervisor import TRY_AGAIN, Child, Supervisor
from service.cluster.swap import Swap
from service.cluster.swap_board import CHANGED, SwapBoard, Verdict
from service.engine.swapping import UNDER_WAY
from service.settings import load_settings
from tests.service.cluster.fake_system import FakeSystem

STOP = signal.SIGUSR1


@dataclass
class Service:
    """Two devices and two workers under a supervisor; engines are ready when a test says so."""

    shared: SharedResources
    system: FakeSystem = field(default_factory=FakeSystem)
    running: set[str] = field(default_factory=lambda: {"worker 0", "worker 1", "a0", "a1"})
    ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.board = self.shared.board
        self.shared.counters.worker_state[:] = SharedCounters.SERVING
        for number, channels in enumerate(self.shared.groups):
            channels[1].pixels.empty = partial(self.ended.append, number)  # type: ignore[method-assign]
        self.groups = [[self._child(f"{group}{device}", STOP) for device in (0, 1)] for group in "ab"]
        for child in self.groups[1]:
            child.spare, child.start_at = True, None

    def _child(self, name: str, stop: signal.Signals) -> Child:
        return Child(
            name,
            main=lambda: 0,
            stop=stop,
            is_running=lambda: name in self.running,
            beats=lambda: self.system.beats_of(name),
            on_death=lambda: self.running.discard(name),
        )

    def refuses(self, reason: str) -> Callable[[], None]:
        return lambda: self.shared.groups[1][0].failure.write(reason)

    def woken(self) -> list[str]:
        return [name for _, name, number in self.system.sent if number == CHANGED and name.startswith("worker")]

    def hung_up(self) -> bool:
        self.swap.reload()
        return True

    def at(self, seconds: float, *events: Callable[[], object]) -> None:
        def event() -> list[int]:
            for each in events:
                each()
            return [STOP]

        self.system.at(seconds, event)

    def ready(self, *names: str) -> Callable[[], None]:
        return lambda: self.running.update(names)

    def asks(self, checkpoint: str, worker: int = 0) -> Callable[[], int]:
        return lambda: self.board.ask(worker, checkpoint)

    def adopts(self, generation: int = 1) -> Callable[[], None]:
        def adopt() -> None:
            for worker in (0, 1):
                self.board.adopt(worker, generation)

        return adopt

    def answers(self, ticket: int = 1, worker: int = 0) -> tuple[Verdict, str] | None:
        return self.board.answer(worker, ticket)

    def run(self, until: float) -> int:
        workers = [self._child(f"worker {index}", signal.SIGTERM) for index in (0, 1)]
        self.swap = Swap(self.shared, self.groups, workers, self.system, "configured")
        self.system.signal_at(until, signal.SIGTERM)
        code = Supervisor(
            workers,
            [child for group in self.groups for child in group],
            self.system,
            drain_timeout=20,
            on_tick=self.swap.tick,
            on_drain=self.swap.abandon,
            on_hang_up=self.hung_up,
        ).run()
        assert self.system.alive == {}
        return code

    def started(self) -> list[tuple[int, str]]:
        """Seconds and names of the engines that were started after the service."""
        return [(round(seconds), name) for seconds, name in self.system.spawned if seconds]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = load_settings({"workers": 2, "port": 0, "device": "cuda:0,cuda:1", "checkpoint": "configured"})
    with closing(SharedResources(settings)) as shared:
        yield Service(shared)


def test_the_other_engines_are_started_take_over_when_all_are_ready_and_the_old_ones_end(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen: list[object] = []

    def look() -> None:
        stopped = [name for _, name, _ in service.system.sent if name.startswith("a")]
        seen.append((service.board.generation, service.answers(), stopped))

    service.at(10, service.asks("next"), lambda: service.board.count(1, 0, 3))
    service.at(11, service.ready("b0"))
    service.at(12, look)
    service.at(13, service.ready("b1"))
    service.at(14, look, service.adopts())
    service.at(15, look, lambda: service.board.count(1, 0, 0))
    service.at(17, look)
    assert service.run(60) == 0
    assert service.started() == [(10, "b0"), (10, "b1")]
    assert service.board.checkpoints[1].read() == "next"
    served = (Verdict.SERVED, "")
    assert seen == [(0, None, []), (1, None, []), (1, served, []), (1, served, ["a0", "a1"])]
    assert service.system.sent_to("a0")[0][1] == STOP
    assert (service.ended, service.woken()) == ([0], ["worker 0", "worker 1"])
    beginning, end = "loading next beside the model that is served", "the engines that no longer serve have ended"
    assert [message for message in caplog.messages if "SIG" not in message] == [beginning, end]


def test_an_engine_that_cannot_serve_the_checkpoint_leaves_the_old_ones_serving(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.at(10, service.asks("bad"))
    service.at(11, service.ready("b0"))
    service.at(12, service.refuses("bad: weights are missing"))
    service.at(13, service.asks("good"))
    service.at(15, service.ready("b0", "b1"))
    service.at(17, service.adopts())
    assert service.run(60) == 0
    assert service.answers(1) is None  # the second ticket is answered
    assert service.answers(2) == (Verdict.SERVED, "")
    assert service.started() == [(10, "b0"), (10, "b1"), (13, "b0"), (13, "b1")]
    assert caplog.messages == ["the next checkpoint is refused, and the old one goes on: bad: weights are missing"]
    assert service.board.reloads == (1, 1, True)
    assert (12, "b0", signal.SIGKILL) in [(round(seconds), name, sent) for seconds, name, sent in service.system.sent]


@pytest.mark.parametrize("code", [1, -9])
def test_an_engine_that_ends_before_it_is_ready_is_a_refusal_and_not_the_services_end(
    code: int, service: Service
) -> None:
    service.at(10, service.asks("bad"))
    service.system.end_at(12, "b1", code)
    assert service.run(60) == 0
    assert service.answers() == (Verdict.REFUSED, "an engine ended before it was ready")
    assert service.board.reloads == (0, 1, False)
    assert service.board.generation == 0
    assert service.system.time >= 1060


def test_an_engine_that_goes_about_it_otherwise_is_started_again_meanwhile(service: Service) -> None:
    service.at(10, service.asks("next"))
    service.system.end_at(12, "b1", TRY_AGAIN)
    service.at(14, service.ready("b0", "b1"))
    service.at(15, service.adopts())
    assert service.run(60) == 0
    assert service.started() == [(10, "b0"), (10, "b1"), (12, "b1")]
    assert service.answers() == (Verdict.SERVED, "")


def test_what_a_device_has_not_allowed_one_model_it_is_not_asked_for_another(service: Service) -> None:
    current, following = (channels[1] for channels in service.shared.groups)
    current.change_option("compile", "no-graphs")
    following.failure.write("of the load before")
    service.at(10, service.asks("next"))
    service.at(14, service.ready("b0", "b1"))
    service.at(15, service.adopts())
    assert service.run(60) == 0
    assert service.answers() == (Verdict.SERVED, "")
    assert following.changed_options() == {"compile": "no-graphs"}


def test_a_model_with_memory_for_smaller_batches_alone_is_refused(service: Service) -> None:
    service.at(10, service.asks("next"))
    service.at(12, lambda: service.shared.groups[1][1].change_option("max_batch", 32))
    assert service.run(60) == 0
    assert service.answers() == (Verdict.REFUSED, "cuda:1: not enough memory beside the model that is served")


def test_a_worker_that_has_not_begun_to_serve_is_not_woken_and_not_waited_for(service: Service) -> None:
    service.shared.counters.worker_state[:] = SharedCounters.LISTENING, 0  # its engine has died; it has just begun
    service.at(10, service.asks("next"))
    service.at(12, service.ready("b0", "b1"))
    service.at(14, lambda: service.board.adopt(0, 1))
    assert service.run(60) == 0
    assert service.answers() == (Verdict.SERVED, "")
    assert service.woken() == ["worker 0"]


def test_of_two_requests_at_once_the_second_is_told_so(service: Service) -> None:
    service.at(10, service.asks("next"))
    service.at(11, service.asks("another", worker=1))
    service.at(13, service.ready("b0", "b1"))
    service.at(14, service.adopts())
    assert service.run(60) == 0
    assert service.answers(worker=1) == (Verdict.UNDER_WAY, UNDER_WAY)
    assert service.answers(worker=0) == (Verdict.SERVED, "")


def test_whoever_asks_before_the_workers_have_the_next_engines_is_told_at_once(service: Service) -> None:
    heard: list[object] = []

    def look(ticket: int) -> Callable[[], None]:
        return lambda: heard.append(service.answers(ticket, worker=1))

    service.at(10, service.asks("next"))
    service.at(11, service.asks("another", worker=1))
    service.at(12, look(1))
    service.at(13, service.ready("b0", "b1"))
    service.at(14, service.asks("a third", worker=1))
    service.at(15, look(2))
    service.at(16, service.adopts())
    assert service.run(60) == 0
    assert heard == [(Verdict.UNDER_WAY, UNDER_WAY)] * 2


def test_nothing_is_loaded_while_an_engine_that_serves_is_started_again(service: Service) -> None:
    service.running.discard("a1")
    service.at(10, service.asks("next"))
    service.at(14, service.ready("a1"))
    assert service.run(60) == 0
    assert service.started() == [(14, "b0"), (14, "b1")]


def test_a_hang_up_together_with_a_request_is_heeded_after_it(service: Service) -> None:
    service.at(10, service.asks("next"), service.hung_up)
    service.at(11, service.ready("b0", "b1"))
    service.at(12, service.adopts())
    service.at(20, service.ready("a0", "a1"))
    service.at(21, service.adopts(2))
    assert service.run(60) == 0
    assert [checkpoint.read() for checkpoint in service.board.checkpoints] == ["configured", "next"]
    assert [name for _, name in service.started()] == ["b0", "b1", "a0", "a1"]


def test_an_engine_that_is_refused_is_not_started_again_though_it_was_to_be(service: Service) -> None:
    def event() -> list[int]:
        service.refuses("bad: weights are missing")()
        return service.system._end("b1", TRY_AGAIN)

    service.at(10, service.asks("bad"))
    service.system.at(12, event)
    assert service.run(60) == 0
    assert service.started() == [(10, "b0"), (10, "b1")]
    assert service.ended == [1]


def test_an_engine_that_took_over_may_fail_as_often_as_any_other(service: Service) -> None:
    service.at(10, service.asks("next"))
    service.at(11, service.ready("b0", "b1"))
    service.at(12, service.adopts())
    for seconds in (14, 15, 17, 20, 25):
        service.system.end_at(seconds, "b1", 1)
    assert service.run(60) == 0
    assert [seconds for seconds, name in service.started() if name == "b1"] == [10, 14, 16, 19, 24, 33]


def test_a_request_while_old_engines_end_is_served_after_them(service: Service) -> None:
    service.at(10, service.asks("second"), lambda: service.board.count(0, 0, 1))
    service.at(11, service.ready("b0", "b1"))
    service.at(12, service.adopts())
    service.at(14, service.asks("third", worker=1))
    service.at(20, lambda: service.board.count(0, 0, 0))
    service.at(24, service.ready("a0", "a1"))
    service.at(26, service.adopts(2))
    assert service.run(60) == 0
    assert [(round(seconds), name) for seconds, name in service.started()][2:] in (
        [(20, "a0"), (20, "a1")],
        [(21, "a0"), (21, "a1")],
    )
    assert service.board.checkpoints[0].read() == "third"
    assert service.system.sent_to("b0")[0] < (29, STOP)
    assert service.answers(worker=1) == (Verdict.SERVED, "")


def test_a_hang_up_loads_the_configured_checkpoint_again(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    service.board.checkpoints[1].write("")
    service.system.signal_at(10, signal.SIGHUP)
    service.at(12, service.ready("b0", "b1"))
    service.at(13, service.adopts())
    assert service.run(60) == 0
    assert service.board.checkpoints[1].read() == "configured"
    assert service.board.generation == 1
    assert service.started() == [(10, "b0"), (10, "b1")]
    assert "SIGHUP: draining" not in caplog.messages


def test_after_a_swap_the_engines_that_serve_are_started_again_and_the_others_are_not(service: Service) -> None:
    service.at(10, service.asks("next"), lambda: service.board.count(0, 0, 1))
    service.at(11, service.ready("b0", "b1"))
    service.at(12, service.adopts())
    service.system.end_at(14, "a1", -11)
    service.system.end_at(16, "b1", -9)
    assert service.run(60) == 0
    assert service.started() == [(10, "b0"), (10, "b1"), (16, "b1")]


def test_an_old_engine_that_does_not_end_is_killed(service: Service) -> None:
    service.system.stubborn = {"a1"}
    service.at(10, service.asks("next"))
    service.at(11, service.ready("b0", "b1"))
    service.at(12, service.adopts())
    assert service.run(60) == 0
    [(stopped, first), (killed, second)] = [(when, sent) for when, name, sent in service.system.sent if name == "a1"]
    assert (first, second) == (STOP, signal.SIGKILL)
    assert killed - stopped == 31  # looked at every second: beyond 30
    assert service.ended == [0]


def test_a_service_that_ends_while_it_loads_says_so_to_who_waits(service: Service) -> None:
    service.at(10, service.asks("next"))
    assert service.run(12) == 0
    assert service.answers() == (Verdict.REFUSED, "the service is about to stop")


def test_a_worker_that_ended_neither_holds_old_engines_nor_waits_for_a_checkpoint() -> None:
    board = SwapBoard("configured", workers=2)
    board.count(0, 0, 2)
    board.count(1, 0, 3)
    board.ask(1, "next")
    board.forget_worker(1)
    assert board.in_progress(0) == 2
    assert board.requests() == []
