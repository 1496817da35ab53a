"""Failed background tasks and threads are logged, counted and restarted."""

import asyncio
from collections.abc import Iterator

import pytest

from service import background
from service.background import Restarts, Tasks, keep_running, supervised_thread
from service.errors import EngineUnavailable
from service.observe.metrics import Metrics
from tests.service.beginnings import beginnings_below
from tests.service.fakes import on_a_loop, until

# Tasks and threads that `service.background` does not start, and where their errors appear.
ALLOWED = {
    "service/cli/answers.py:LocalAnswers._answers": "its jobs are awaited",
    "service/engine/engine.py:LocalEngine.__init__": "the engine reports its end",
    "service/engine/streams.py:Streams.run": "as the engine's thread, which raises the error",
    "service/engine/texts.py:TextFeatures.__init__": "its jobs are awaited",
    "service/engine/texts.py:TextFeatures._compute": "of a request, which awaits it",
    "service/http/connection.py:HttpConnection._take_headers": "the answer has the error",
    "service/models/folder.py:in_time": "the error is raised where the result is read",
    "service/server.py:Server.serve": "the server itself, which is awaited",
    "service/web/app.py:_beside": "a timer that ends the process",
    "service/web/decoders.py:Decoders._ask": "the end of a process; asyncio logs the error",
    "service/web/admit.py:Cancellation.watch": "of a request, which it cancels",
}


def test_every_background_task_is_supervised() -> None:
    others = ("service/background.py:", "service/extensions/")
    functions = {name for name in beginnings_below("service") if not name.startswith(others)}
    assert functions == ALLOWED.keys()


@pytest.fixture
def restarted() -> Iterator[list[str]]:
    """The names of the tasks that were started again."""
    names: list[str] = []
    background.on_restart(names.append)
    yield names
    background.on_restart(lambda _: None)


class Duty:
    """Fails as often as it has errors, and then works until it is cancelled."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.pauses: list[float] = []
        self.works = False

    async def __call__(self) -> None:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        self.works = True
        await asyncio.Event().wait()

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def run(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.works = True


@on_a_loop
async def test_a_failed_task_is_started_again(
    restarted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    duty = Duty(KeyError("first"), EngineUnavailable("second"), asyncio.CancelledError())
    task = keep_running("watch", duty, sleep=duty.sleep)
    await until(lambda: duty.works)
    assert restarted == ["watch"] * 3
    assert duty.pauses == [1, 2, 4]
    assert caplog.messages[0] == "background task watch failed: it restarts in 1 s"
    assert "KeyError: 'first'" in caplog.text
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert len(restarted) == 3


@on_a_loop
async def test_a_failed_thread_is_started_again(restarted: list[str]) -> None:
    duty = Duty(KeyError("first"), OSError("second"))
    thread = supervised_thread("read", duty.run, name="read_1", sleep=duty.pauses.append)
    thread.start()
    await until(lambda: not thread.is_alive())
    assert duty.works
    assert (restarted, duty.pauses, thread.name) == (["read"] * 2, [1, 2], "read_1")


def test_a_long_run_resets_the_pause(restarted: list[str]) -> None:
    now = 0.0
    restarts = Restarts("watch", lambda: now)
    assert [restarts.failed(OSError()) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    restarts.begin()
    now = 61.0
    assert restarts.failed(OSError()) == 1
    assert len(restarted) == 8


def test_restarts_are_counted_by_their_task(restarted: list[str]) -> None:
    metrics = Metrics()
    metrics.observe_process()
    Restarts("watch").failed(OSError())
    assert metrics.registry.get_sample_value("vit_task_restarts_total", {"task": "watch"}) == 1
    assert restarted == []


@on_a_loop
async def test_a_defect_of_a_single_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(error: Exception) -> None:
        raise error

    tasks = Tasks()
    done, _ = await asyncio.wait(
        [tasks.begin(fail(KeyError("x"))), tasks.begin(fail(EngineUnavailable("y")))]
    )
    assert len(done) == 2
    assert len(caplog.records) == 1
    assert "KeyError: 'x'" in caplog.text
