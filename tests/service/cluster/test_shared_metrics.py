"""The memory that processes count in: taken at the start, whatever becomes of the disk."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import values

from service.cluster.shared_resources import SharedMetrics
from service.errors import SettingsError
from service.observe.metrics import Metrics, count_in_files

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_SKIPPED = 77
PROCESSES = ("worker-0", "engine-0")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedMetrics]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = SharedMetrics(PROCESSES)
    yield shared
    shared.close()


def count_everything(folder: Path, process: str) -> Metrics:
    """Touch more series than a service ever has."""
    count_in_files(folder, process)
    metrics = Metrics(folder)
    for endpoint in (f"/an/endpoint/with/a/long/name/{number}" for number in range(24)):
        metrics.request_duration.labels(endpoint).observe(0.1)
        for code in (200, 400, 401, 404, 405, 408, 413, 415, 422, 429, 499, 500, 503, 504):
            metrics.requests.labels(endpoint, str(code)).inc()
    for number in range(64):
        metrics.rejected.labels(f"a_problem_of_some_kind_{number}").inc()
    for device in (f"cuda:{number}" for number in range(8)):
        metrics.batch_size.labels(device).observe(3)
        for release in ("full", "idle", "delay"):
            metrics.batches.labels(device, release).inc()
    metrics.inflight.inc()
    return metrics


def test_every_file_has_its_memory_before_anything_is_counted_and_never_needs_more(
    shared: SharedMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")

    def sizes() -> dict[str, int]:
        found = {path.name: path.stat() for path in shared.folder.glob("*.db")}
        assert all(file.st_blocks * 512 == file.st_size for file in found.values())
        return {name: file.st_size for name, file in found.items()}

    before = sizes()
    for process in PROCESSES:
        metrics = count_everything(shared.folder, process)
    assert sizes() == before
    assert all(path.is_symlink() for path in shared.folder.glob("*.db"))
    assert b"vit_inflight_requests 2.0" in metrics.render()


def test_a_disk_that_is_full_after_the_start_changes_nothing(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _count_on_a_full_disk(tmp_path)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == _SKIPPED:
        pytest.skip("no disk of one's own may be mounted here")
    assert code == 0  # not -SIGBUS


def _count_on_a_full_disk(folder: Path) -> int:
    """Count in a process whose temporary files lie on a disk that is full, and return its exit code."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        return _SKIPPED
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if libc.mount(b"none", bytes(folder), b"tmpfs", 0, b"size=64k"):
        return _SKIPPED
    tempfile.tempdir = str(folder)
    shared = SharedMetrics(PROCESSES)
    with (folder / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(bytes(1024)):
                pass
        except OSError:
            pass
    metrics = count_everything(shared.folder, PROCESSES[0])
    return 0 if b"vit_inflight_requests 1.0" in metrics.render() else 1


@pytest.mark.parametrize("call", ["posix_fallocate", "memfd_create", "symlink"])
def test_too_little_space_at_the_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, call, full)
    with pytest.raises(SettingsError, match=r"counters.*No space left") as raised:
        SharedMetrics(PROCESSES)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_the_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(prefix: str) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(SettingsError, match=r"TMPDIR.*No space left"):
        SharedMetrics(PROCESSES)


def test_a_folder_that_somebody_has_removed_keeps_the_service_from_nothing(shared: SharedMetrics) -> None:
    shutil.rmtree(shared.folder)  # as what clears out temporary files does; the fixture closes
    assert all(os.pread(file._descriptor, 1, 0) == b"\0" for file in shared._files)
