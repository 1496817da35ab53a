"""The log never blocks who logs, whatever becomes of its reader."""

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.observe import logs
from service.observe.logs import JsonFormatter, LogWriter, Printed
from tests.launcher import until

REPOSITORY = Path(__file__).resolve().parents[3]


class Log:
    """A writer to a small pipe."""

    def __init__(self, capacity: int) -> None:
        read_end, self.write_end = os.pipe()
        self.reader = os.fdopen(read_end)
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, 4096)
        self.writer = LogWriter(self.write_end, capacity)

    def log(self, text: str, **extra: Any) -> None:
        record = {"msg": text, "levelno": logging.INFO, "name": "vitserve", **extra}
        self.writer.handle(logging.makeLogRecord(record))

    def read_lines(self, count: int) -> list[str]:
        return [self.reader.readline().rstrip("\n") for _ in range(count)]

    def close(self) -> None:
        """End the thread: it must not write to a descriptor that is another's by then."""
        self.reader.close()
        self.writer.flush()
        self.writer.close()
        until(lambda: all(thread.name != "log-writer" for thread in threading.enumerate()))
        os.close(self.write_end)


@pytest.fixture
def made() -> Iterator[list[Log]]:
    logs_of_test: list[Log] = []
    yield logs_of_test
    for each in logs_of_test:
        each.close()


@pytest.fixture
def log(made: list[Log]) -> Log:
    made.append(Log(capacity=100))
    return made[0]


def test_lines_beyond_the_queue_are_dropped(log: Log) -> None:
    drops: list[int] = []
    log.writer.on_drop = lambda: drops.append(1)
    for number in range(10_000):
        log.log(f"{number:0100d}")
    dropped = log.writer.dropped
    assert dropped == len(drops) > 9_000
    numbers: list[int] = []
    told = 0
    while len(numbers) + told < 10_000:
        [line] = log.read_lines(1)
        if line.isdigit():
            numbers.append(int(line))
        else:
            told += int(line.removesuffix(" log lines were dropped because nothing read the log"))
    assert numbers == sorted(set(numbers))
    assert told == dropped


def test_a_line_keeps_its_records_fields(log: Log) -> None:
    log.writer.setFormatter(JsonFormatter())
    log.log("first", fields={"status": 200})
    [line] = log.read_lines(1)
    assert json.loads(line)["status"] == 200


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_child_can_log_in_the_same_format(log_format: str) -> None:
    logs.configure(log_format, "info")
    assert logs.format_in_use() == log_format


def test_the_end_waits_briefly_for_lines(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.log("last words")
    log.writer.flush()
    assert log.read_lines(1) == ["last words"]
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.01)
    for _ in range(100):
        log.log("x" * 1000)
    started = time.monotonic()
    log.writer.flush()
    assert time.monotonic() - started < 10


def test_a_fork_writes_its_own_lines(log: Log) -> None:
    log.log("of the parent")
    log.writer.flush()
    child = os.fork()
    if child == 0:
        log.log("of the child")
        log.writer.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    log.log("of the parent again")
    assert log.read_lines(3) == ["of the parent", "of the child", "of the parent again"]


def run_unread(script: str) -> int:
    """Run a script with a full pipe as its output, which nobody reads, and return its exit code."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write_end, b"x" * 4096)
    code = f"from service.observe import logs\nlogs.configure('text', 'info')\n{script}"
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    try:
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdout=write_end, stderr=write_end
        ) as process:
            try:
                return process.wait(60)
            finally:
                process.kill()
    finally:
        os.close(write_end)
        os.close(read_end)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("print('much ' * 20_000, flush=True)", 0),
        ("import sys; sys.stderr.write('much ' * 20_000 + '\\n')", 0),
        ("import sys; sys.exit('much ' * 20_000)", 1),
        ("raise ValueError('much ' * 20_000)", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
    ids=["print", "write", "exit", "error", "dump"],
)
def test_what_is_printed_waits_for_nobody(script: str, code: int) -> None:
    assert run_unread(f"logs.never_wait()\n{script}") == code


def test_printed_lines_are_in_the_log(log: Log) -> None:
    printed = Printed(log.writer)
    print("one\ntwo", file=printed)
    print("three", end="", file=printed, flush=True)
    assert log.read_lines(3) == ["one", "two", "three"]
