"""The processes of one service: their shares, their metrics, the end of an engine.

Tests with real processes and signals run in their own process, because this process has threads and
signal handlers.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model.errors import CheckpointError, NewProcessNeeded
from service.errors import SettingsError
from service.extensions.cluster.engine_process import STOP, serve_until_stopped
from service.extensions.cluster.processes import SERVING, Report
from service.extensions.cluster.run import Cluster
from service.extensions.cluster.supervisor import TRY_AGAIN, Child
from service.extensions.cluster.worker import share, worker_settings
from service.models.override import Override
from service.observe.metrics import Metrics
from service.settings import load_settings
from tests.extensions.cluster.scripts import run
from tests.service.fakes import FakePredictor, model_info, on_a_loop

NONE = memoryview(b"")

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("total", "workers"), [(256, 8), (256, 3), (5, 5), (0, 2)])
def test_shares_of_workers_sum_to_the_limit(total: int, workers: int) -> None:
    settings = load_settings({"workers": workers})
    shares = [share(total, index, settings) for index in range(workers)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_share_fits_the_largest_request() -> None:
    settings = load_settings(
        {"workers": 8, "queue_size": 256, "key_max_requests": 3, "max_images_per_request": 64}
    )
    own = worker_settings(settings, 7)
    assert (own.queue_size, own.key_max_requests) == (64, 1)
    assert worker_settings(load_settings({"workers": 2, "queue_size": 48}), 0).queue_size == 48


def test_draining_announces_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.extensions.cluster.run.OperatingSystem", lambda: None)
    with Cluster(load_settings({"port": 0, "workers": 2}), lambda *_: pytest.fail("loads")) as own:
        own.draining()
        for process in (*own.engines, *own.workers):
            process.state = SERVING
        own.reported(Report(SERVING, {}))  # a worker was ready just before the signal


def child() -> Child:
    return Child("engine", lambda _: 0, STOP)


def reports(of: Child) -> list[Report]:
    return [report for report in of.link.receive() if report != Report()]


@on_a_loop
async def test_engine_reports_its_served_versions(
    tmp_path: Path,
) -> None:
    own = child()
    settings = load_settings({"workers": 2})
    loaded: list[str] = []

    def load(settings: Any, _: object) -> Any:
        loaded.append(settings.checkpoint)
        return FakePredictor(), model_info()

    overrides = {"": Override(3, "swapped")}
    running = asyncio.create_task(
        serve_until_stopped(settings, own, tmp_path / "engine", load, Metrics(), overrides, NONE)
    )
    found: list[Report] = []
    while not found:
        found = reports(own)
        await asyncio.sleep(0.001)
    assert (found, loaded) == ([Report(SERVING, overrides)], ["swapped"])
    os.kill(os.getpid(), STOP)
    assert await running == 0


@on_a_loop
async def test_engine_asks_once_for_a_new_process(
    tmp_path: Path,
) -> None:
    def fail(*_: object) -> Any:
        raise NewProcessNeeded("no memory", "max_batch", 16)

    own = child()
    settings = load_settings({"workers": 2})
    assert (
        await serve_until_stopped(settings, own, tmp_path / "engine", fail, Metrics(), {}, NONE)
        == TRY_AGAIN
    )
    assert reports(own) == [Report(options={"max_batch": 16})]
    own.options = {"max_batch": 16}
    assert (
        await serve_until_stopped(settings, own, tmp_path / "engine", fail, Metrics(), {}, NONE)
        == 1
    )


@on_a_loop
async def test_failed_engine_start_logs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Any:
        raise CheckpointError("no such folder")

    own = child()
    assert (
        await serve_until_stopped(
            load_settings({"device": "cpu"}), own, tmp_path / "engine", fail, Metrics(), {}, NONE
        )
        == 1
    )
    assert caplog.messages == ["cannot start: no such folder"]


def test_metrics_include_ended_processes() -> None:
    script = """
import os, tempfile
from prometheus_client import generate_latest
from prometheus_client.multiprocess import mark_process_dead
from service.extensions.cluster.run import metrics_in
from service.observe.metrics import Metrics

folder = tempfile.mkdtemp()

def count(images, inflight):
    pid = os.fork()
    if pid == 0:
        own = metrics_in(folder)
        for _ in range(images):
            own.count_image("a")
        own.inflight.inc(inflight)
        os._exit(0)
    os.waitpid(pid, 0)
    return pid

count(3, 1)
mark_process_dead(count(4, 2), folder)
scraped = metrics_in(folder)
scraped.count_image("a")
lines = generate_latest(scraped).decode().splitlines()
print(sorted(line for line in lines if line.startswith(("vit_images_total", "vit_inflight"))))
"""
    assert run(script) == "['vit_images_total{model=\"a\"} 8.0', 'vit_inflight_requests 1.0']"


def test_unusable_socket_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.extensions.cluster.run.OperatingSystem", lambda: None)
    for folder, message in (
        (tmp_path / "none", "TMPDIR"),
        (tmp_path / (90 * "x"), "expected a shorter path"),
    ):
        if "x" in folder.name:
            folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with pytest.raises(SettingsError, match=message):
            Cluster(load_settings({"port": 0, "workers": 2}), lambda *_: None)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


PROLOGUE = """
import os, signal
from service.models.override import Override
from service.extensions.cluster.processes import Link, OperatingSystem, Report

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
system = OperatingSystem()

def until_ended():
    while not (ended := system.reap()):
        system.wait(60, [])
    [(pid, code)] = ended
    return pid, code
"""


def test_process_exits_with_its_result() -> None:
    script = """
def fail():
    raise RuntimeError("it does not work")

for main in (lambda: 0, lambda: 7, fail):
    pid = system.spawn("child", main)
    ended, code = until_ended()
    assert ended == pid
    print(code)
assert system.reap() == []
"""
    assert run(PROLOGUE + script) == "0\n7\n1"


def test_all_ended_children_are_reaped() -> None:
    script = """
pids = [system.spawn("child", lambda code=code: code) for code in (0, 3, 0)]
for pid in pids:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(sorted(system.reap()) == sorted(zip(pids, (0, 3, 0))), system.reap())
"""
    assert run(PROLOGUE + script) == "True []"


def test_a_process_that_fails_says_why() -> None:
    script = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")

def fail():
    raise RuntimeError("it does not work")

system.spawn("the child", fail)
until_ended()
"""
    lines = run(PROLOGUE + script).splitlines()
    assert (lines[0], lines[-1]) == ("the child failed", "RuntimeError: it does not work")


@pytest.mark.parametrize(
    "name", ["engine cuda:0", "worker " + 9000 * "0"], ids=["short", "longer than its arguments"]
)
def test_a_process_is_shown_by_its_name(name: str) -> None:
    script = """
from pathlib import Path

def cut(arguments):
    return arguments.strip(b"\\0").decode()

own = Path("/proc/self/cmdline").read_bytes()
read_end, write_end = os.pipe()
pid = system.spawn(NAME, lambda: os.write(write_end, b"!") and signal.pause() or 0)
os.read(read_end, 1)
shown = Path(f"/proc/{pid}/cmdline").read_bytes()
title = f"vitserve: {NAME}"[: len(own) - 1]
print(cut(shown) == title, Path("/proc/self/cmdline").read_bytes() == own)
system.kill(pid, signal.SIGKILL)
until_ended()
"""
    assert run(f"{PROLOGUE}NAME = {name!r}\n{script}") == "True True"


def test_child_has_default_signal_handlers() -> None:
    script = """
for number in (signal.SIGTERM, signal.SIGKILL):
    pid = system.spawn("child", lambda: signal.pause() or 0)
    system.kill(pid, number)
    print(until_ended() == (pid, -number))
"""
    assert run(PROLOGUE + script) == "True\nTrue"


def test_signal_to_an_ended_child_is_dropped() -> None:
    script = """
pid = system.spawn("child", lambda: 3)
print(until_ended() == (pid, 3))
system.kill(pid, signal.SIGTERM)
"""
    assert run(PROLOGUE + script) == "True"


def test_news_ends_the_supervisors_wait() -> None:
    script = """
assert system.wait(0, []) == []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(os.getpid(), number)
print(system.wait(60, []) == [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
link = Link()
sent = Report(2, {"": Override(3, "a\\nb")}, options={"max_batch": 4})
system.spawn("child", lambda: link.send(sent) or link.send(Report()) or 0)
reports = []
while len(reports) < 2:
    system.wait(60, [link])
    reports += link.receive()
print(reports == [sent, Report()])
"""
    assert run(PROLOGUE + script) == "True\nTrue"


def test_no_child_outlives_its_parent() -> None:
    script = """
read_end, write_end = os.pipe()
parent = os.fork()
if parent == 0:
    os.close(read_end)
    def live():
        os.write(write_end, b"x")
        signal.pause()
        return 0
    OperatingSystem().spawn("child", live)
    signal.pause()
os.close(write_end)
os.read(read_end, 1)  # the child lives
os.kill(parent, signal.SIGKILL)
print(os.read(read_end, 1) == b"")  # and so does nobody any more
"""
    assert run(PROLOGUE + script) == "True"


SCRIPT = """
import os, socket, sys
from service.cli.main import open_standard_streams
open_standard_streams()
with socket.socket() as opened:
    assert opened.fileno() > 2
assert all(os.readlink(f"/proc/self/fd/{number}") == "/dev/null" for number in (0, 2))
print("an error", file=sys.stderr)
print("fine")
"""


def test_closed_stream_is_not_reused() -> None:
    shell = ["sh", "-c", 'exec "$0" -c "$1" 0<&- 2>&-', sys.executable, SCRIPT]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n")
