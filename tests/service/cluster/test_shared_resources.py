"""What the processes of a service share from before they are forked."""

from __future__ import annotations

import gc
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.cluster.shared_resources import SharedResources, listen
from service.errors import SettingsError
from service.settings import load_settings


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def shared(temporary: Path) -> Iterator[SharedResources]:
    shared = SharedResources(load_settings({"workers": 3, "port": 0, "device": "cuda:0,cuda:1"}))
    yield shared
    shared.close()


def test_a_listener_each_on_one_port() -> None:
    listeners = listen("127.0.0.1", 0, 3)
    assert len({listener.getsockname() for listener in listeners}) == 1
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(listeners[0].getsockname())
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("localhost", socket.AF_INET), ("::", socket.AF_INET6)]
)
def test_the_form_of_the_host_says_which_addresses_are_listened_on(
    host: str, family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object]] = []

    def create_server(address: tuple[str, int], *, family: int, **options: Any) -> SimpleNamespace:
        asked.append((address, family))
        return SimpleNamespace(getsockname=lambda: (host, 4321))

    monkeypatch.setattr(socket, "create_server", create_server)
    assert len(listen(host, 0, 2)) == 2
    assert asked == [((host, 0), family), ((host, 4321), family)]


def test_connections_that_wait_for_a_worker_survive_it(shared: SharedResources) -> None:
    """A worker's end closes its own descriptor, not the socket."""
    of_a_worker = shared.listeners[0].dup()
    callers = [socket.create_connection(("127.0.0.1", shared.port)) for _ in range(20)]
    of_a_worker.close()
    accepted = 0
    for listener in shared.listeners:
        listener.setblocking(False)
        while True:
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                break
            accepted += 1
    assert accepted == 20
    for caller in callers:
        caller.close()


def test_an_engine_a_device_and_room_for_every_permit_even_while_cancelled_ones_are_given_back(
    shared: SharedResources,
) -> None:
    assert [channel.device for channel in shared.channels] == ["cuda:0", "cuda:1"]
    assert [channel.slots for channel in shared.channels] == [512, 512]
    assert shared.counters.capacity == 256


def test_one_worker_may_ask_several_engines(temporary: Path) -> None:
    shared = SharedResources(load_settings({"workers": 1, "port": 0, "device": "cuda:0,cuda:1"}))
    assert [listener.getsockname()[1] for listener in shared.listeners] == [shared.port]
    shared.close()


def test_closing_gives_every_descriptor_back_but_that_of_the_folders_lock(temporary: Path) -> None:
    gc.collect()  # what other tests have left goes now or not at all
    before = len(list(Path("/proc/self/fd").iterdir()))
    SharedResources(load_settings({"workers": 2, "port": 0, "device": "cuda:0,cuda:1"})).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1


def test_nothing_is_left_behind(temporary: Path) -> None:
    shared = SharedResources(load_settings({"workers": 2, "port": 0}))
    assert shared.metrics.folder.is_dir()
    assert shared.metrics.folder.stat().st_mode & 0o077 == 0
    shared.close()
    assert list(temporary.iterdir()) == []


def test_counters_of_a_service_that_was_killed_are_removed_and_those_of_one_that_runs_are_not(
    shared: SharedResources, temporary: Path
) -> None:
    killed = temporary / "vitserve-metrics-killed"
    killed.mkdir()
    (killed / "lock").touch()
    (killed / "counter_worker-0.db").touch()
    foreign = temporary / "vitserve-metrics-without-a-lock"
    foreign.mkdir()
    other = SharedResources(load_settings({"workers": 2, "port": 0}))
    assert not killed.exists()
    assert foreign.exists()
    assert shared.metrics.folder.is_dir()
    other.close()


def test_a_machine_without_temporary_files_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(SettingsError, match="TMPDIR"):
        SharedResources(load_settings({"workers": 2, "port": 0}))


@pytest.mark.parametrize(
    ("limit", "recent", "allowed"),
    [
        (0, "0", False),
        ((256 << 20) - 1, "0", False),
        (256 << 20, "0", True),
        (256 << 20, "1GiB", False),
        (resource.RLIM_INFINITY, "1GiB", True),
    ],
)
def test_a_limit_on_files_that_is_too_low_is_told_in_one_line(
    limit: int, recent: str, allowed: bool, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit) if kind == resource.RLIMIT_FSIZE else None)
    settings = load_settings({"workers": 2, "port": 0, "recent_bytes": recent})
    if allowed:
        SharedResources(settings).close()
        return
    with pytest.raises(SettingsError, match=rf"limit is {limit} \(ulimit -f, RLIMIT_FSIZE\)"):
        SharedResources(settings)
