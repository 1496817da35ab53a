"""Sockets in memory: messages take a seeded time, arrive in pieces, and are cut where their sender is killed."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from service.cluster.channel import EngineChannel
from service.cluster.shared_memory import SharedCounters
from tests.simulation.scheduler import Process, Scheduler

Factory = Callable[[], asyncio.BaseProtocol]


class Network:
    """Makes connections; a message arrives within `delay` seconds, later ones never before earlier ones.

    Attributes:
        receiving: the end whose protocol is handed bytes at this moment.
    """

    def __init__(self, scheduler: Scheduler, *, delay: float) -> None:
        self.scheduler = scheduler
        self.delay = delay
        self.receiving: Endpoint | None = None

    def latency(self) -> float:
        """Return the seconds that one message takes: often next to nothing, seldom nearly `delay`."""
        chance = self.scheduler.random.random
        return self.delay * chance() ** 3


class _Peer:
    """Answers SO_PEERCRED as a socket of the same user does."""

    family = socket.AF_UNIX

    def getsockopt(self, *_: object) -> bytes:
        return struct.pack("3i", os.getpid(), os.getuid(), os.getgid())


class Endpoint(asyncio.Transport):
    """One end of a connection; its other end is `peer`, and `stranger` is whether that is no worker of the service."""

    peer: Endpoint

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.process: Process | None = None
        self.protocol: asyncio.Protocol | None = None
        self.closing = False
        self.stranger = False
        self._network = network
        self._early: list[bytes | None] = []
        self._in_flight: deque[bytes | None] = deque()
        self._last_arrival = 0.0

    def attach(self, process: Process, factory: Factory) -> asyncio.BaseProtocol:
        """Give this end to a process; what came before it did is read now."""
        self.process = process
        self.protocol = cast(asyncio.Protocol, factory())
        process.on_end.append(self.cut)
        process.call_soon(self.protocol.connection_made, self)
        for data in self._early:
            self._read(data)
        return self.protocol

    async def open(self, process: Process, factory: Factory) -> tuple[Endpoint, asyncio.BaseProtocol]:
        """Do the part of `create_unix_connection`."""
        protocol = self.attach(process, factory)
        waiter = process.create_future()
        process.call_soon(lambda: waiter.done() or waiter.set_result(None))
        await waiter
        return self, protocol

    # What protocols ask of a transport.

    def write(self, data: Any) -> None:
        if self.closing or not data:
            return
        chance = self._network.scheduler.random.random
        data = bytes(data)
        while len(data) > 1 and chance() < 0.15:
            size = 1 + int(chance() * (len(data) - 1))
            self._send(data[:size])
            data = data[size:]
        self._send(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self._send(None)
            if self.process is not None and self.protocol is not None:
                self.process.call_soon(self.protocol.connection_lost, None)

    abort = close

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _Peer() if name == "socket" else default

    def cut(self) -> None:
        """End the connection as the kernel does for a killed process; what it wrote last may be lost in part."""
        if self.closing:
            return
        chance = self._network.scheduler.random.random
        self.closing = True
        if self._in_flight and chance() < 0.5:
            last = int(chance() * len(self._in_flight))
            data = self._in_flight[last]
            assert data is not None
            kept = [*list(self._in_flight)[:last], data[: int(chance() * len(data))]]
            self._in_flight = deque([*kept, *[b""] * (len(self._in_flight) - len(kept))])
        self._send(None)

    # The way of the bytes; None is the end of the stream.

    def _send(self, data: bytes | None) -> None:
        scheduler = self._network.scheduler
        self._last_arrival = max(self._last_arrival, scheduler.now + self._network.latency())
        self._in_flight.append(data)
        scheduler.at(self._last_arrival, self._arrive)

    def _arrive(self) -> None:
        data = self._in_flight.popleft()
        if self.peer.process is None:
            self.peer._early.append(data)
        else:
            self.peer._read(data)

    def _read(self, data: bytes | None) -> None:
        assert self.process is not None
        if data != b"":
            self.process.call_soon(self._deliver, data)

    def _deliver(self, data: bytes | None) -> None:
        if self.closing:
            return
        assert self.protocol is not None
        if data is None:
            self.protocol.eof_received()
            self.close()
        else:
            self._network.receiving = self
            self.protocol.data_received(data)
            self._network.receiving = None


class Listener:
    """A listening socket that outlives the processes that accept from it, as one that is made before they fork."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._backlog: deque[Endpoint] = deque()
        self._server: Server | None = None

    def connect(self) -> Endpoint:
        """Return the client's end of a connection, accepted or waiting to be."""
        if self.network.scheduler.random.random() < 0.02:
            raise BlockingIOError("many connections wait to be accepted")
        client, server = Endpoint(self.network), Endpoint(self.network)
        client.peer, server.peer = server, client
        self._backlog.append(server)
        self._accept_soon()
        return client

    def serve(self, process: Process, factory: Factory) -> Server:
        """Do the part of `create_unix_server`."""
        self._server = Server(self, process, factory)
        process.on_end.append(self._server.close)
        self._accept_soon()
        return self._server

    def _accept_soon(self) -> None:
        if self._server is not None and self._backlog:
            accept = functools.partial(self._server.process.call_soon, self._accept, self._server)
            self.network.scheduler.after(self.network.latency(), accept)

    def _accept(self, server: Server) -> None:
        if server is self._server:
            while self._backlog:
                self._backlog.popleft().attach(server.process, server.factory)

    def stop(self, server: Server) -> None:
        """Let nobody accept until another process does."""
        if self._server is server:
            self._server = None


class Server:
    """Stands in for `asyncio.Server`."""

    def __init__(self, listener: Listener, process: Process, factory: Factory) -> None:
        self.process = process
        self.factory = factory
        self._listener = listener

    def close(self) -> None:
        self._listener.stop(self)


class SimulatedChannel(EngineChannel):
    """A channel whose socket is simulated; its shared memory is real."""

    def __init__(self, index: int, counters: SharedCounters, network: Network, *, slots: int) -> None:
        super().__init__(index, f"cuda:{index}", counters, slots=slots)
        self.key = b"the key of this service"
        self.listener.close()
        self.listener = Listener(network)  # type: ignore[assignment]

    def connect(self) -> Any:
        return cast(Listener, self.listener).connect()

    def close(self) -> None:
        self.pixels.close()
