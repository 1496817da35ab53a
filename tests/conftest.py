"""Fixtures that every test folder may use."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests import launcher, logging_state

# Before torch loads: threads that spin between operators stall the server processes that tests
# start beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# One process of several that share the cores: threads of all of them on all cores would wait for
# one another. The processes that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests read no graphs of other runs, and leave none in the home folder.
os.environ["VIT_CACHE_DIR"] = "off"

# Under nohup SIGHUP is ignored, and so it would be by the services that tests start to see what
# they do with it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real checkpoints and pictures: VIT_SHARED, or `../shared` beside the
    repository.
    """
    folder = Path(os.environ.get("VIT_SHARED", REPOSITORY.parent / "shared")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} does not exist (set VIT_SHARED)")
    return folder


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a test's command did to logging."""
    with logging_state.restored():
        yield


@pytest.fixture(autouse=True)
def priority_as_it_was() -> Iterator[None]:
    """Fail a test that takes priority from this process: every later test would be slow, with its
    servers.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files whose tests may take longest, so that no process is alone with one at
    the end.

    How long a test may take stands in its mark `timeout`. One process alone keeps the usual order.
    """
    if not hasattr(config, "workerinput"):
        return
    longest: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), float(mark.args[0]) if mark else 0.0)
    items.sort(key=lambda item: -longest[item.path])


def pytest_collection_finish() -> None:
    """Leave what was imported out of the collections of garbage, each of which would take half a
    second.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of the `vitserve` processes that a failed test used."""
    report = yield
    if report.failed:
        report.sections += [(f"log of {command}", log) for command, log in launcher.recent_logs()]
    if call.when == "teardown":
        launcher.forget_ended()
    return report
