"""Memory that a pass frees stays with the process for the next one."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from model.runtime import cpu

FAULTS_OF_A_PASS = """
import ctypes, resource, sys
from model.runtime.cpu import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
if sys.argv[1] == "keep":
    assert keep_freed_memory()


def one_pass():
    blocks = [libc.malloc(2**23) for _ in range(4)]  # 8 MiB each, which are there at the same time
    for block in blocks:
        libc.memset(block, 1, 2**23)
    for block in blocks:
        libc.free(block)


for _ in range(3):
    one_pass()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    one_pass()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", FAULTS_OF_A_PASS, mode]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_the_kernel_clears_no_pages_for_a_pass() -> None:
    assert faults("as it is") > 1000, "what is mended"
    assert faults("keep") < 100


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_thresholds_of_the_environment_hold(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("glibc is told others"))
    assert not cpu.keep_freed_memory()
