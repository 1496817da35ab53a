"""The addresses that a service listens on: both families, names, and Unix sockets."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest

from service.addresses import SocketFiles, listen, parse_listen_hosts, port_of
from service.errors import SettingsError
from service.settings import load_settings


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def answers(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as caller:
        caller.settimeout(10)
        return caller.connect_ex((host, port)) == 0


@pytest.mark.parametrize(
    ("hosts", "reached"),
    [
        ("::", ["127.0.0.1", "::1"]),
        ("0.0.0.0,::", ["127.0.0.1", "::1"]),
        ("::,0.0.0.0", ["127.0.0.1", "::1"]),
        ("::1", ["::1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("127.0.0.1,127.0.0.2", ["127.0.0.1", "127.0.0.2"]),
        ("localhost", ["127.0.0.1"]),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_hosts_are_reached_in_their_families(
    opened: ExitStack, hosts: str, reached: list[str], count: int
) -> None:
    processes = listen(tuple(hosts.split(",")), 0, count)
    for listener in chain.from_iterable(processes):
        opened.enter_context(listener)
    port = port_of(processes[0])
    tried = ("127.0.0.1", "127.0.0.2", "::1")
    found = [host for host in tried if answers(host, port)]
    assert set(reached) <= set(found)
    if hosts in ("::1", "0.0.0.0"):
        assert ("::1" in found) == (hosts == "::1")


def test_only_a_stale_socket_is_replaced(opened: ExitStack, tmp_path: Path) -> None:
    path = tmp_path / "http"
    host = (f"unix:{path}",)
    [[dead]] = listen(host, 0)
    dead.close()
    processes = listen(host, 0, 2)
    for listener in chain.from_iterable(processes):
        opened.enter_context(listener)
    with pytest.raises(OSError, match="in use") as raised:
        listen(host, 0)
    assert raised.value.filename == f"unix:{path}"
    files = SocketFiles(processes[0])
    assert path.stat().st_mode & 0o777 == 0o666
    files.remove()
    assert not path.exists()
    path.write_text("data")
    with pytest.raises(OSError, match="not a socket"):
        listen(host, 0)
    assert path.read_text() == "data"


def test_the_socket_of_a_successor_stays(opened: ExitStack, tmp_path: Path) -> None:
    host = (f"unix:{tmp_path / 'http'}",)
    [[before]] = listen(host, 0)
    files = SocketFiles([before])
    before.close()
    [[successor]] = listen(host, 0)
    opened.enter_context(successor)
    files.remove()
    assert (tmp_path / "http").exists()


@pytest.mark.parametrize(
    ("written", "hosts", "is_local"),
    [
        ("[::1], 127.0.0.1", ("::1", "127.0.0.1"), True),
        ("unix:///run/a,unix:/run/a", ("unix:/run/a",), True),
        ("unix:/run/a,0.0.0.0", ("unix:/run/a", "0.0.0.0"), False),
        ("localhost,::1", ("localhost", "::1"), True),
        ("localhost,vit.example.org", ("localhost", "vit.example.org"), False),
        ("0:0::0", ("::",), False),
    ],
)
def test_hosts_are_parsed(written: str, hosts: tuple[str, ...], is_local: bool) -> None:
    settings = load_settings({"host": written})
    assert settings.hosts == hosts
    assert settings.is_local == is_local


@pytest.mark.parametrize(
    "host",
    [
        "http://a",
        "127.0.0.1:8000",
        "[::1]:80",
        "*",
        "256.0.0.1",
        "a,,b",
        "unix:run",
        "unix:",
        f"unix:/{'a' * 120}",
    ],
)
def test_what_is_not_a_host_stops_the_start(host: str) -> None:
    with pytest.raises(
        SettingsError, match=r"VIT_HOST=.*: expected (IP addresses|unix: and an absolute path)"
    ):
        load_settings({"host": host})
    with pytest.raises(ValueError, match="expected"):
        parse_listen_hosts(host)
