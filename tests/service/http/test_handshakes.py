"""What a listener ignores before it is closed, and whether callers wait."""

from __future__ import annotations

import select
import socket
import sys
from types import SimpleNamespace

import pytest

from service.http.handshakes import has_callers, heed_handshakes, ignore_handshakes
from tests.service.fakes import PATIENCE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such filters")
def test_nothing_but_what_begins_a_connection_is_ignored() -> None:
    """To a filter a datagram looks like a segment whose flags are its sixth byte."""
    with socket.socket(type=socket.SOCK_DGRAM) as listener, socket.socket(type=socket.SOCK_DGRAM) as caller:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(PATIENCE)
        for set_filter, passed in (
            (ignore_handshakes, {flags for flags in range(64) if not flags & 0x02}),
            (heed_handshakes, set(range(64))),
        ):
            set_filter(listener)
            for flags in range(64):
                caller.sendto(b"flags%c and the rest" % flags, listener.getsockname())
            datagrams = {listener.recv(100) for _ in passed}
            assert datagrams == {b"flags%c and the rest" % flags for flags in passed}


def test_a_caller_whom_the_kernel_has_accepted_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not has_callers(listener)
        with socket.create_connection(listener.getsockname(), PATIENCE):
            assert has_callers(listener)


def test_a_look_for_callers_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    poll = SimpleNamespace(register=lambda *_: None, poll=waits.append)
    monkeypatch.setattr(select, "poll", lambda: poll)
    with socket.socket() as listener:
        assert not has_callers(listener)
    assert waits == [0]
