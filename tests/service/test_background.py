"""Failed background tasks and threads are logged, counted and restarted."""

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from service import background
from service.background import Restarts, Tasks, keep_running, supervised_thread
from service.errors import EngineUnavailable
from service.observe.metrics import Metrics
from tests.service.fakes import on_a_loop, until

REPOSITORY = Path(__file__).resolve().parents[2]
BEGINS = {
    "create_task",
    "ensure_future",
    "Thread",
    "Timer",
    "start_new_thread",
    "ThreadPoolExecutor",
    "run_in_executor",
}

# Tasks and threads that `service.background` does not start, and where their errors appear.
ALLOWED = {
    "service/cli/answers.py:LocalAnswers._answers": "its jobs are awaited",
    "service/engine/loading.py:_keep": "in a child: it ends that process with its parent",
    "service/engine/local.py:LocalEngine.__init__": "the engine reports its end",
    "service/engine/streams.py:Streams.run": "as the engine's thread, which raises the error",
    "service/engine/texts.py:TextFeatures.__init__": "its jobs are awaited",
    "service/engine/texts.py:TextFeatures._compute": "of a request, which awaits it",
    "service/http/connection.py:Connection._begin": "the answer has the error",
    "service/models/folder.py:in_time": "the error is raised where the result is read",
    "service/extensions/tracing/spans.py:Tracing.close": "the log has the error",
    "service/extensions/cluster/engine_server.py:_Worker.handle": "the error is its answer",
    "service/server.py:Server.serve": "the server itself, which is awaited",
    "service/web/decoders.py:Decoders._ask": "the end of a process; asyncio logs the error",
    "service/extensions/inference_protocol/grpc/call.py:Call.message": "its request awaits it",
    "service/web/admitted.py:Cancellation.watch": "of a request, which it cancels",
}


class Beginnings(ast.NodeVisitor):
    """The functions of a file that start a task or a thread, except in a `TaskGroup`."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.renamed: dict[str, str] = {}
        self.found: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.renamed |= {alias.asname or alias.name: alias.name for alias in node.names}

    def visit_ClassDef(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        name = ""
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) != "group":
            name = called.attr
        elif isinstance(called, ast.Name):
            name = self.renamed.get(called.id, called.id)
        if name in BEGINS:
            self.found.add(".".join(self.scope))
        self.generic_visit(node)


def test_every_background_task_is_supervised() -> None:
    found = set()
    for path in (REPOSITORY / "service").rglob("*.py"):
        beginnings = Beginnings()
        beginnings.visit(ast.parse(path.read_text()))
        file = path.relative_to(REPOSITORY).as_posix()
        found |= {
            f"{file}:{function}" for function in beginnings.found if file != "service/background.py"
        }
    assert found == ALLOWED.keys()


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


def test_the_pause_grows_until_a_run_was_long(restarted: list[str]) -> None:
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
