"""Strangers: anybody on the machine may connect to an engine's address and send what they like."""

from __future__ import annotations

import asyncio

from model.outputs import RequestedOutputs
from service.cluster.protocol import REQUEST_LIMIT, Cancel, Hello, Submit, encode
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.transport import Endpoint, SimulatedChannel


class Stranger(asyncio.Protocol):
    """Connects and sends bytes that no worker sends; it must be turned away without an answer."""

    def __init__(self, channel: SimulatedChannel, process: Process, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._turned_away = False
        choose = scheduler.random
        hello = encode(Hello(0, channel.key))
        forms = (
            encode(Hello(0, b"another key")),
            encode(Hello(len(channel.counters.worker_state), channel.key)),
            encode(Submit(1, 0, 1.0, RequestedOutputs(1))),
            encode(Cancel(1)),
            (REQUEST_LIMIT + 1).to_bytes(4, "little"),
            b"\x05\x00\x00\x00hello",
            hello[: choose.randrange(1, len(hello))],
        )
        data = choose.choice(forms)
        self._may_stay = data == forms[-1]  # what begins as a frame may become one
        try:
            end: Endpoint = channel.connect()
        except BlockingIOError:
            self._may_stay = True
            return
        end.peer.stranger = True
        end.attach(process, lambda: self)
        end.write(data)

    def data_received(self, data: bytes) -> None:
        self._scheduler.violate(f"a stranger is answered: {data!r}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._turned_away = True

    def check(self) -> None:
        """Check that the connection has ended."""
        if not (self._turned_away or self._may_stay):
            self._scheduler.violate("a stranger was not turned away")
