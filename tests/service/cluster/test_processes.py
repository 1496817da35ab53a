"""Real processes and signals, in a process of their own: this one has threads, and handlers of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.service.cluster.scripts import run

pytestmark = pytest.mark.timeout(60)  # processes start

PROLOGUE = """
import os, signal
from service.models.models import Version
from service.cluster.processes import Link, OperatingSystem, Report

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
system = OperatingSystem()

def until_ended():
    while not (ended := system.reap()):
        system.wait(60, [])
    [(pid, code)] = ended
    return pid, code
"""


def test_a_process_ends_with_what_its_work_returns_or_with_one() -> None:
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


def test_all_that_have_ended_are_reaped_at_once() -> None:
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


@pytest.mark.parametrize("name", ["engine cuda:0", "worker " + 9000 * "0"], ids=["short", "longer than its arguments"])
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
print(cut(shown) == f"vitserve: {NAME}"[: len(own) - 1], Path("/proc/self/cmdline").read_bytes() == own)
system.kill(pid, signal.SIGKILL)
until_ended()
"""
    assert run(f"{PROLOGUE}NAME = {name!r}\n{script}") == "True True"


def test_a_process_hears_signals_as_if_it_had_no_parent() -> None:
    script = """
for number in (signal.SIGTERM, signal.SIGKILL):
    pid = system.spawn("child", lambda: signal.pause() or 0)
    system.kill(pid, number)
    print(until_ended() == (pid, -number))
"""
    assert run(PROLOGUE + script) == "True\nTrue"


def test_signals_and_reports_end_the_wait() -> None:
    script = """
assert system.wait(0, []) == []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(os.getpid(), number)
print(system.wait(60, []) == [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
link = Link()
sent = Report(2, {"": Version(3, "a\\nb")}, options={"max_batch": 4})
system.spawn("child", lambda: link.send(sent) or link.send(Report()) or 0)
reports = []
while len(reports) < 2:
    system.wait(60, [link])
    reports += link.receive()
print(reports == [sent, Report()])
"""
    assert run(PROLOGUE + script) == "True\nTrue"


def test_no_process_outlives_the_one_that_started_it() -> None:
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


def test_a_closed_stream_leads_nowhere_and_its_number_is_not_given_to_a_socket() -> None:
    shell = ["sh", "-c", 'exec "$0" -c "$1" 0<&- 2>&-', sys.executable, SCRIPT]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n")
