"""Starting, restarting and ending processes, without processes and without waiting."""

import signal
from dataclasses import dataclass, field

import pytest

from service.extensions.cluster.processes import Report
from service.extensions.cluster.supervisor import TRY_AGAIN, Child, Supervisor
from tests.extensions.cluster.fake_system import FakeLink, FakeSystem

STOP = signal.SIGUSR1
DRAIN_TIMEOUT = 20
GRACE = 5


@dataclass
class Service:
    """Two workers and an engine under a supervisor, and the supervisor's events."""

    system: FakeSystem = field(default_factory=FakeSystem)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = self._child("engine", STOP)
        self.workers = [self._child(f"worker {index}", signal.SIGTERM) for index in (0, 1)]

    def _child(self, name: str, stop: signal.Signals) -> Child:
        return Child(name, lambda child: 0, stop, FakeLink(self.system, name))

    def reported(self, report: Report) -> None:
        assert report.state

    def ended(self, pid: int) -> None:
        self.told.append("ended")

    def draining(self) -> None:
        self.told.append("drain")

    def hung_up(self) -> bool:
        return False

    def run(self) -> int:
        supervisor = Supervisor(
            self.workers, [self.engine], self.system, self, drain_timeout=DRAIN_TIMEOUT
        )
        code = supervisor.run()
        assert self.system.alive == {}
        return code


@pytest.fixture
def service() -> Service:
    return Service()


def test_all_are_started_at_once(service: Service) -> None:
    service.system.signal_at(60, signal.SIGTERM)
    assert service.run() == 0
    assert service.system.spawned == [(0, "engine"), (0, "worker 0"), (0, "worker 1")]
    assert service.told == ["drain", "ended", "ended", "ended"]


# Started again


def test_restart_delays_of_a_child_grow(
    service: Service,
) -> None:
    died = [10, 11, 13, 16, 21, 30, 47, 78, 109]
    for seconds in died:
        service.system.end_at(seconds, "worker 1", -9)
    service.system.signal_at(150, signal.SIGTERM)
    assert service.run() == 0
    starts = service.system.starts_of(service.workers[1])
    assert [start - end for start, end in zip(starts[1:], died, strict=True)] == [
        0,
        1,
        2,
        4,
        8,
        16,
        30,
        30,
        30,
    ]
    assert len(service.system.starts_of(service.workers[0])) == 1


def test_other_events_do_not_delay_a_start(service: Service) -> None:
    for seconds in (3, 4):
        service.system.end_at(seconds, "engine")
    service.system.signal_at(4.5, signal.SIGUSR1)
    service.system.signal_at(20, signal.SIGTERM)
    assert service.run() == 0
    assert service.system.starts_of(service.engine) == [0, 3, 5]


def test_long_life_resets_the_restart_delay(service: Service) -> None:
    for seconds in (10, 11, 13, 80, 81):
        service.system.end_at(seconds, "engine")
    service.system.signal_at(100, signal.SIGTERM)
    assert service.run() == 0
    assert service.system.starts_of(service.engine) == [0, 10, 12, 15, 80, 82]


@pytest.mark.parametrize(("code", "how"), [(1, "code 1"), (0, "code 0"), (-9, "signal 9")])
@pytest.mark.parametrize("name", ["engine", "worker 0"])
def test_child_that_never_ran_ends_service(
    name: str, code: int, how: str, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.system.serving.remove(name)
    service.system.end_at(3, name, code)
    assert service.run() == 1
    assert len(service.system.spawned) == 3
    assert f"{name} ended with {how} before it was ready" in caplog.text


def test_a_signal_ends_a_failing_start(
    service: Service,
) -> None:
    service.system.serving.remove("engine")
    service.system.stubborn = {"worker 0"}
    service.system.end_at(3, "engine", 1)
    service.system.signal_at(5, signal.SIGTERM)
    service.system.end_at(9, "worker 0", 0)
    assert service.run() == 128 + signal.SIGTERM
    assert (5, "worker 0", signal.SIGKILL) in [
        (round(when), name, sent) for when, name, sent in service.system.sent
    ]


def test_a_child_that_ran_keeps_restarting(
    service: Service,
) -> None:
    def forget() -> list[int]:
        service.system.serving.remove("engine")
        return []

    service.system.end_at(3, "engine")
    service.system.at(4, forget)
    service.system.end_at(5, "engine")
    service.system.signal_at(10, signal.SIGTERM)
    assert service.run() == 0
    assert service.system.starts_of(service.engine) == [0, 3, 6]


def test_the_sixth_failure_ends_the_service(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """As the engine of a GPU that is lost inside of a container."""
    for seconds in (100, 101, 103, 106, 111, 120):
        service.system.end_at(seconds, "engine", 1)
    assert service.run() == 1
    assert service.system.starts_of(service.engine) == [0, 100, 102, 105, 110, 119]
    restarts = [
        f"engine ended with code 1: starting it again in {delay} s" for delay in (0, 1, 2, 4, 8)
    ]
    assert caplog.messages == [*restarts, "engine ended with code 1 after 5 restarts: giving up"]


@pytest.mark.parametrize(
    "other", [(120, -9), (200, 1)], ids=["killed by somebody", "lived for long"]
)
def test_a_killed_child_ends_no_service(other: tuple[int, int], service: Service) -> None:
    for at in (100, 101, 103, 106, 111):
        service.system.end_at(at, "engine", 1)
    service.system.end_at(other[0], "engine", other[1])
    service.system.signal_at(300, signal.SIGTERM)
    assert service.run() == 0


def test_try_again_restarts_at_once(
    service: Service,
) -> None:
    service.system.serving.remove("engine")
    for seconds in (3, 5, 7):
        service.system.end_at(seconds, "engine", TRY_AGAIN)
    service.system.signal_at(10, signal.SIGTERM)
    assert service.run() == 0
    assert service.system.starts_of(service.engine) == [0, 3, 5, 7]
    assert service.engine.restarts == 3


# Frozen


@pytest.mark.parametrize("name", ["engine", "worker 1"])
def test_frozen_child_is_replaced(
    name: str, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.system.at(10.2, service.system.freezes(name))
    service.system.signal_at(60, signal.SIGTERM)
    assert service.run() == 0
    [(killed, number), _] = service.system.sent_to(name)
    assert number == signal.SIGKILL
    assert 20 <= killed <= 22
    assert [(seconds, other) for seconds, other in service.system.spawned if seconds] == [
        (killed, name)
    ]
    assert caplog.text.count(f"{name} is frozen") == 1


def test_starting_child_may_be_silent_longer(service: Service) -> None:
    """It maps large libraries, with the interpreter's lock held, from a slow disk."""
    service.system.serving.remove("engine")
    service.system.freezes("engine")()
    service.system.at(50, service.system.thaws("engine"))
    service.system.signal_at(60, signal.SIGTERM)
    assert service.run() == 0
    assert len(service.system.spawned) == 3


def test_a_frozen_start_ends_the_service(service: Service) -> None:
    service.system.serving.remove("engine")
    service.system.at(0, service.system.freezes("engine"))
    assert service.run() == 1
    [(killed, _)] = service.system.sent_to("engine")
    assert 59 <= killed <= 62


def test_suspended_machine_freezes_no_child(service: Service) -> None:
    """A suspended machine stops the children's heartbeats, too."""

    def suspend() -> list[int]:
        service.system.time += 3600
        return []

    service.system.at(9.9, service.system.freezes("engine"))
    service.system.at(10, suspend)
    service.system.at(3611, service.system.thaws("engine"))
    service.system.signal_at(3700, signal.SIGTERM)
    assert service.run() == 0
    assert len(service.system.spawned) == 3


def test_frozen_child_gets_the_drain_timeout(
    service: Service,
) -> None:
    service.system.stubborn = {"worker 0"}
    service.system.signal_at(10, signal.SIGTERM)
    service.system.at(11, service.system.freezes("worker 0"))
    assert service.run() == 0
    [_, (killed, _)] = service.system.sent_to("worker 0")
    assert killed >= 10 + DRAIN_TIMEOUT + GRACE


# Ended


@pytest.mark.parametrize(
    ("received", "code"),
    [
        ([signal.SIGHUP, signal.SIGHUP], 0),
        ([signal.SIGTERM, signal.SIGHUP], 0),
        ([signal.SIGHUP, signal.SIGTERM], 0),
        ([signal.SIGHUP, signal.SIGTERM, signal.SIGTERM], 143),
    ],
)
def test_a_hang_up_is_no_second_signal(
    received: list[signal.Signals], code: int, service: Service
) -> None:
    service.system.stubborn = {"worker 0"}
    for turn, number in enumerate(received):
        service.system.signal_at(10 + turn, number)
    service.system.end_at(18, "worker 0", 0)
    assert service.run() == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_engines_end_after_the_workers(number: signal.Signals, service: Service) -> None:
    service.system.stubborn = {"worker 0"}
    service.system.signal_at(10, number)
    service.system.end_at(18, "worker 0", 0)
    assert service.run() == 0
    assert (
        service.system.sent_to("worker 0")
        == service.system.sent_to("worker 1")
        == [(10, signal.SIGTERM)]
    )
    assert service.system.sent_to("engine") == [(18, STOP)]
    assert service.told.count("drain") == 1


def test_drain_timeout_kills_all_processes(
    service: Service,
) -> None:
    service.system.stubborn = {"worker 0"}
    service.system.signal_at(10, signal.SIGTERM)
    assert service.run() == 0
    [(_, first), (killed, second)] = service.system.sent_to("worker 0")
    assert (first, second) == (signal.SIGTERM, signal.SIGKILL)
    assert 10 + DRAIN_TIMEOUT + GRACE <= killed <= 10 + DRAIN_TIMEOUT + GRACE + 1
    assert service.system.sent_to("engine") == [(killed, signal.SIGKILL)]


def test_a_stubborn_engine_is_killed(service: Service) -> None:
    service.system.stubborn = {"engine"}
    service.system.signal_at(10, signal.SIGTERM)
    assert service.run() == 0
    assert service.system.sent_to("engine") == [(10, STOP), (10 + GRACE, signal.SIGKILL)]


def test_a_second_signal_kills_all_at_once(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.system.stubborn = {"engine", "worker 0", "worker 1"}
    service.system.signal_at(10, signal.SIGTERM)
    service.system.signal_at(12, signal.SIGINT)
    assert service.run() == 128 + signal.SIGINT
    for name in service.system.stubborn:
        assert service.system.sent_to(name)[-1] == (12, signal.SIGKILL)
    assert service.system.time < 1012.1
    assert "SIGINT again: ending at once" in caplog.text


def test_draining_service_starts_no_process(service: Service) -> None:
    """A child that awaits its restart is due all the time, and is not to be started any more."""
    for seconds in (2, 3, 5):
        service.system.end_at(seconds, "worker 1")
    service.system.stubborn = {"worker 0"}
    service.system.signal_at(6, signal.SIGTERM)
    service.system.end_at(20, "worker 0", 0)
    assert service.run() == 0
    assert service.system.starts_of(service.workers[1]) == [0, 2, 4]
    assert service.system.turns <= 35
