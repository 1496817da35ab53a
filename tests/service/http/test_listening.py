"""Many callers who connect at the same moment are accepted in few turns of the event loop."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from service.http import listening, server
from service.http.listening import Acceptor
from tests.service.fakes import PATIENCE

CALLERS = 100


class Accepted(asyncio.Protocol):
    def __init__(self, heard: list[asyncio.BaseTransport], acceptor: list[Acceptor]) -> None:
        self._heard, self._acceptor = heard, acceptor

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._heard.append(transport)
        for acceptor in self._acceptor:
            acceptor.accepted()


async def turns_for(callers: int, *, with_acceptor: bool) -> int:
    """The turns of the loop in which all callers, who connected before the first, are accepted."""
    loop = asyncio.get_running_loop()
    heard: list[asyncio.BaseTransport] = []
    acceptors: list[Acceptor] = []

    def make_protocol() -> Accepted:
        return Accepted(heard, acceptors)

    server = await loop.create_server(make_protocol, "127.0.0.1", 0, backlog=CALLERS)
    if with_acceptor:
        acceptors.append(Acceptor(server.sockets, make_protocol))
    address = server.sockets[0].getsockname()
    clients = [socket.create_connection(address) for _ in range(callers)]
    turns = 0
    async with asyncio.timeout(PATIENCE):
        while len(heard) < callers:
            turns += 1
            await asyncio.sleep(0)
    if with_acceptor:
        acceptors[0].accepted()
        await acceptors[0].close()  # nothing is accepted after it
    await asyncio.sleep(0)
    server.close()
    for transport in heard:
        transport.abort()  # type: ignore[attr-defined]
    for client in clients:
        client.close()
    await asyncio.sleep(0)
    assert len(heard) == callers
    return turns


def test_callers_do_not_wait_for_a_turn_each() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(turns_for(CALLERS, with_acceptor=True)) < CALLERS // 2
        assert runner.run(turns_for(1, with_acceptor=True)) >= 1


def test_each_turn_accepts_sixteen_of_each_listener_though_another_has_none() -> None:
    async def run() -> None:
        listeners = [socket.create_server(("127.0.0.1", 0), backlog=CALLERS) for _ in range(2)]
        for listener in listeners:
            listener.setblocking(False)
        made: list[asyncio.Protocol] = []

        def make_protocol() -> asyncio.Protocol:
            made.append(asyncio.Protocol())
            return made[-1]

        acceptor = Acceptor(listeners, make_protocol)
        clients = [socket.create_connection(listeners[1].getsockname()) for _ in range(40)]
        for expected in (16, 32, 40, 40):
            acceptor.accepted()
            acceptor.accepted()  # in the same turn: one look is enough
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(made) == expected
        assert not acceptor._tasks
        await acceptor.close()
        acceptor.accepted()
        for each in (*listeners, *clients):
            each.close()
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_at_the_end_of_listening_as_many_are_accepted_as_the_kernel_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(turns: int) -> int:
        made: list[asyncio.Protocol] = []

        def make_protocol() -> asyncio.Protocol:
            made.append(asyncio.Protocol())
            return made[-1]

        monkeypatch.setattr(listening, "_LAST_TURNS", turns)
        with socket.create_server(("127.0.0.1", 0), backlog=CALLERS) as listener:
            listener.setblocking(False)
            acceptor = Acceptor([listener], make_protocol)
            clients = [socket.create_connection(listener.getsockname()) for _ in range(40)]
            await acceptor.close()
        for client in clients:
            client.close()
        return len(made)

    assert listening._LAST_TURNS * listening._MORE_A_TURN == server._BACKLOG
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert [runner.run(run(turns)) for turns in (1, 2, 9)] == [16, 32, 40]


def test_one_that_left_before_it_was_accepted_harms_nobody() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def run() -> None:
            heard: list[asyncio.BaseTransport] = []
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            acceptors: list[Acceptor] = []
            acceptors.append(Acceptor([listener], lambda: Accepted(heard, acceptors)))
            with socket.create_connection(listener.getsockname()) as leaving:
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with socket.create_connection(listener.getsockname()) as staying:
                acceptors[0].accepted()
                async with asyncio.timeout(PATIENCE):
                    while not any(transport.get_extra_info("peername") == staying.getsockname() for transport in heard):
                        await asyncio.sleep(0)
            await acceptors[0].close()
            listener.close()
            for transport in heard:
                transport.abort()  # type: ignore[attr-defined]

        runner.run(run())


def test_who_was_accepted_last_has_a_protocol_when_nobody_more_is() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def run() -> None:
            heard: list[asyncio.BaseTransport] = []
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            acceptor = Acceptor([listener], lambda: Accepted(heard, []))
            with socket.create_connection(listener.getsockname()):
                acceptor.accepted()
                await asyncio.sleep(0)
                assert not heard
                await acceptor.close()
                assert len(heard) == 1
            listener.close()
            heard[0].abort()  # type: ignore[attr-defined]

        runner.run(run())


def test_sockets_that_the_loop_does_not_take_are_closed_and_all_are_waited_for() -> None:
    async def run() -> None:
        given: list[socket.socket] = []

        async def connect(make_protocol: object, connection: socket.socket) -> None:
            assert not connection.getblocking()
            given.append(connection)
            if len(given) == 1:
                raise ValueError("a defect of ours is not the next one's")
            await asyncio.sleep(0)
            raise OSError("the caller is gone")

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            acceptor = Acceptor([listener], asyncio.Protocol)
            acceptor._loop.connect_accepted_socket = connect  # type: ignore[assignment,method-assign]
            [duplicate] = acceptor._listeners
            with (
                socket.create_connection(listener.getsockname()),
                socket.create_connection(listener.getsockname()),
            ):
                acceptor._accept()
                await acceptor.close()
        assert [connection.fileno() == -1 for connection in given] == [False, True]
        assert duplicate.fileno() == -1
        given[0].close()

    asyncio.run(run())
