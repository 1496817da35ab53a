"""Memory that was freed goes back to the operating system, every half a minute."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from service.http import lifecycle
from tests.service.fakes import PATIENCE


def test_the_heap_is_trimmed_after_each_wait() -> None:
    """A clock that is wound on by hand."""
    waits: list[float] = []
    turn, trimmed = threading.Semaphore(0), threading.Semaphore(0)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        turn.acquire()

    thread = lifecycle.trim_regularly(trimmed.release, wait)
    assert thread is not None
    assert thread.daemon
    assert not trimmed.acquire(blocking=False)
    for _ in range(2):
        turn.release()
        assert trimmed.acquire(timeout=PATIENCE)
    assert set(waits) == {30.0}


def test_a_c_library_without_malloc_trim_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "malloc_trim", lambda: None)
    assert lifecycle.trim_regularly() is None


def test_pages_of_every_size_are_asked_back_of_a_c_library_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    library = SimpleNamespace(malloc_trim=lambda size: left.append(size.value))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library if name is None else None)
    trim = lifecycle.malloc_trim()
    assert trim is not None
    trim()
    assert left == [0]
    del library.malloc_trim
    assert lifecycle.malloc_trim() is None


BELOW_A_USED_BLOCK = """
import ctypes, resource, sys, threading
from pathlib import Path
from service.http import lifecycle

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20


libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: what glibc comes to by itself, once large blocks were freed
size = 2**20
blocks = [libc.malloc(size) for _ in range(64)]
for block in blocks:
    libc.memset(block, 1, size)
for block in blocks[:-1]:
    libc.free(block)
left = resident()

done, waited = threading.Event(), threading.Semaphore(1)
trim = lifecycle.malloc_trim()
lifecycle.trim_regularly(lambda: (trim(), done.set()), lambda seconds: waited.acquire())
done.wait(20)
print(left - resident())
"""


@pytest.mark.skipif(lifecycle.malloc_trim() is None, reason="the C library is not glibc")
def test_what_a_burst_left_below_a_used_block_goes_back() -> None:
    command = [sys.executable, "-c", BELOW_A_USED_BLOCK]
    found = subprocess.run(command, capture_output=True, text=True, timeout=25, check=True)
    assert int(found.stdout) > 50  # MiB, of 64
