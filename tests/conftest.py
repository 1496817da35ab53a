"""Fixtures of all test folders."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

from tests import launcher, logging_state

# Before torch loads: threads that spin between operators would slow the servers of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# If several processes share the cores, each uses one thread; servers of the tests inherit this.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests use a separate cache of graphs.
os.environ["VIT_CACHE_DIR"] = "off"

# nohup ignores SIGHUP, and services would inherit that, although tests send it to them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder with real checkpoints and pictures: VIT_SHARED, or `../shared`."""
    folder = Path(os.environ.get("VIT_SHARED", REPOSITORY.parent / "shared")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} does not exist (set VIT_SHARED)")
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_graph_of_openvino() -> Iterator[None]:
    """Compile one graph for any batch size, except in tests of graphs for each size."""
    from tests.support.openvino_graphs import one_graph  # not before the environment is set

    with one_graph():
        yield


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo a test's changes to logging."""
    with logging_state.restored():
        yield


@pytest.fixture(autouse=True)
def priority_as_it_was() -> Iterator[None]:
    """Fail a test that lowers the priority of this process, which would slow all later tests."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


TOGETHER = {
    "tests/e2e/page": "page",  # a browser and two servers
    "tests/extensions/formats": "libraries",  # timm and transformers, imported for five seconds
    "tests/model/checkpoint": "libraries",
}
"""Folders whose files run in one process, by what they share."""


class SharingFiles(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Give a process a whole file, or all files that share something slow."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return TOGETHER.get(file.rpartition("/")[0], file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SharingFiles:
    """Replace `--dist loadfile`."""
    return SharingFiles(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files whose tests may take longest, so that all processes end together.

    The mark `timeout` says how long a test may take; 0 is no limit. Of equal files, those in
    folders with more tests begin; files of a folder stay together and share its fixtures. A single
    process keeps the usual order.
    """
    if not hasattr(config, "workerinput"):
        return
    longest: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] or "inf") if mark else 0.0
        longest[item.path] = max(longest.get(item.path, 0.0), seconds)
    counts = Counter(item.path.parent for item in items)
    items.sort(key=lambda item: (-longest[item.path], -counts[item.path.parent], item.path.parent))


def pytest_collection() -> None:
    """Collect no garbage during the collection of tests, which only creates objects that stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection, which would take half a second each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of a failed test's `vitserve` processes."""
    report = yield
    if report.failed:
        report.sections += [(f"log of {command}", log) for command, log in launcher.recent_logs()]
    if call.when == "teardown":
        launcher.forget_ended()
    return report
