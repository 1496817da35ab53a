"""The log never blocks who logs, whatever becomes of its reader."""

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from service.observe import logs
from service.observe.logs import JsonFormatter, LogWriter
from tests.launcher import until


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


def test_a_line_keeps_the_fields_of_its_record(log: Log) -> None:
    log.writer.setFormatter(JsonFormatter())
    log.log("first", fields={"status": 200})
    [line] = log.read_lines(1)
    assert json.loads(line)["status"] == 200


def test_the_end_waits_for_lines_for_a_moment(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.log("last words")
    log.writer.flush()
    assert log.read_lines(1) == ["last words"]
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.01)
    for _ in range(100):
        log.log("x" * 1000)
    started = time.monotonic()
    log.writer.flush()
    assert time.monotonic() - started < 10


def test_a_forked_process_writes_its_own_lines(log: Log) -> None:
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
