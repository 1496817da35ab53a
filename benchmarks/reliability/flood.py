"""A load generator that costs little: `python -m benchmarks.reliability.flood PLAN.json`.

One thread, epoll, sockets that are kept alive and requests whose bytes are ready. It runs beside the server on the same
machine, so it tells its own share of a core, and how late it was: a generator that cannot keep up measures itself.

Open loop (`rate`): requests leave at the moments of a Poisson process, whatever is answered, and a latency counts from
that moment. Closed loop (`connections`): each connection sends its next request as soon as it has an answer.
"""

from __future__ import annotations

import gc
import json
import math
import random
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_GIVE_UP = 15.0
"""Seconds after the last request in which answers still count."""

_READ_BYTES = 64 << 10


@dataclass
class Outcomes:
    """What became of the requests; lists of seconds.

    Attributes:
        answered: from a request's moment to its answer 200, if the load had settled by that moment.
        refused: the same for 503.
        unsettled: the same for every answer to a request that was sent before.
        late: by which requests left after their moment.
        other: answers with any other status.
        lost: connections that broke or were refused, and requests without an answer.
        in_time: answers 200 before the last moment, and not while the load settled.
        connected: connections that were opened.
        busy: the generator's share of a core.
        seconds: in which `in_time` was counted.
    """

    answered: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    unsettled: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    other: int = 0
    lost: int = 0
    in_time: int = 0
    connected: int = 0
    busy: float = 0.0
    seconds: float = 0.0


class _Connection:
    """A socket with at most one request whose answer is awaited.

    An answer may come before the whole request is sent. The rest is sent all the same, unless the server closes.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.moment = 0.0
        self.unsent = memoryview(b"")
        self.waits = False
        self.idle = False
        self.heard = b""
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex(address)

    def ask(self, request: memoryview, moment: float) -> None:
        self.unsent, self.moment, self.heard = request, moment, b""
        self.waits, self.idle = True, False

    def send(self) -> None:
        """Send what the socket takes; raises OSError if it is broken."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            return

    def read(self) -> tuple[int, bool] | None:
        """Return the status of the answer and whether the connection is kept, once it is whole.

        Raises:
            OSError: the connection ended.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError
        self.heard += data
        end = self.heard.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = self.heard[:end].lower()
        at = head.index(b"content-length: ") + len(b"content-length: ")
        if len(self.heard) < end + 4 + int(head[at:].partition(b"\r")[0]):
            return None
        return int(head[9:12]), b"connection: close" not in head


class Flood:
    """Sends requests to an address and counts what becomes of them."""

    def __init__(
        self, address: tuple[str, int], requests: list[memoryview], seed: int = 0, settle: float = 0.0
    ) -> None:
        self.outcomes = Outcomes()
        self._settle = settle
        self._address = address
        self._requests = requests
        self._random = random.Random(seed)
        self._epoll = select.epoll()
        self._open: dict[int, _Connection] = {}
        self._idle: list[_Connection] = []
        self._on_free: Callable[[_Connection | None], None] = lambda connection: None
        self._begin = self._end = 0.0

    def open_loop(self, rate: float, seconds: float) -> Outcomes:
        """Send `rate` requests a second until the load has settled, and then for some seconds."""
        seconds += self._settle
        moments = self._moments(rate, seconds)
        self._on_free = self._keep
        self._run(moments, seconds)
        return self.outcomes

    def closed_loop(self, connections: int, seconds: float) -> Outcomes:
        """Keep as many requests under way as there are connections."""
        seconds += self._settle
        end = time.perf_counter() + seconds

        def again(connection: _Connection | None) -> None:
            now = time.perf_counter()
            if now < end:
                self._start(connection or self._connect(), now)

        self._on_free = again
        now = time.perf_counter()
        self._run(iter([now] * connections), seconds, until=end)
        return self.outcomes

    def _keep(self, connection: _Connection | None) -> None:
        if connection is not None:
            connection.idle = True
            self._idle.append(connection)

    def _moments(self, rate: float, seconds: float) -> Iterator[float]:
        moment = begin = time.perf_counter()
        while (moment := moment + self._random.expovariate(rate)) < begin + seconds:
            yield moment

    def _run(self, moments: Iterator[float], seconds: float, until: float = math.inf) -> None:
        begin, used = time.perf_counter(), time.process_time()
        self._begin, self._end = begin + self._settle if self._settle else 0.0, begin + seconds
        due = next(moments, math.inf)
        stop = begin + seconds + _GIVE_UP
        busy = None
        while (now := time.perf_counter()) < stop:
            while due <= now:
                self._start(self._idle.pop() if self._idle else self._connect(), due)
                self.outcomes.late.append(now - due)
                due = next(moments, math.inf)
                now = time.perf_counter()
            if busy is None and now >= begin + seconds:
                busy = (time.process_time() - used) / (now - begin)
            if math.isinf(due) and now >= min(until, begin + seconds) and not self._waiting():
                break
            for number, events in self._epoll.poll(max(0.0, min(due, stop, now + 0.05) - now)):
                self._on_event(self._open[number], events)
        self.outcomes.busy = busy or 0.0
        self.outcomes.seconds = seconds - self._settle
        self.outcomes.lost += self._waiting()
        for connection in list(self._open.values()):
            self._close(connection)
        self._epoll.close()

    def _waiting(self) -> int:
        return sum(connection.waits for connection in self._open.values())

    def _connect(self) -> _Connection:
        connection = _Connection(self._address)
        self.outcomes.connected += 1
        self._open[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        return connection

    def _start(self, connection: _Connection, moment: float) -> None:
        connection.ask(self._random.choice(self._requests), moment)
        try:
            connection.send()
        except OSError:
            self._lose(connection)

    def _on_event(self, connection: _Connection, events: int) -> None:
        answer = None
        try:
            if events & ~select.EPOLLOUT:
                answer = connection.read()
            if connection.unsent and (answer is None or answer[1]):
                connection.send()
        except OSError:
            if answer is None:
                self._lose(connection)
                return
        if answer is not None and connection.waits:
            self._count(connection, answer[0])
            if not answer[1]:
                self._close(connection)
                self._on_free(None)
                return
        if not connection.waits and not connection.unsent and not connection.idle:
            self._on_free(connection)

    def _count(self, connection: _Connection, status: int) -> None:
        connection.waits = False
        now = time.perf_counter()
        seconds = now - connection.moment
        of_status = {200: self.outcomes.answered, 503: self.outcomes.refused}.get(status)
        if of_status is None:
            self.outcomes.other += 1
        else:
            (of_status if connection.moment >= self._begin else self.outcomes.unsettled).append(seconds)
        self.outcomes.in_time += status == 200 and self._begin <= now <= self._end

    def _lose(self, connection: _Connection) -> None:
        waited = connection.waits
        self._close(connection)
        if waited:
            self.outcomes.lost += 1
            self._on_free(None)

    def _close(self, connection: _Connection) -> None:
        connection.waits = False
        if connection.idle:
            self._idle.remove(connection)
        del self._open[connection.socket.fileno()]
        connection.socket.close()


def post(body: bytes) -> memoryview:
    """Return a whole request to classify a picture."""
    head = (
        f"POST /classify HTTP/1.1\r\nHost: vitserve\r\nContent-Type: image/jpeg\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return memoryview(head.encode() + body)


def main() -> int:
    """Follow a plan, and print the outcomes as JSON.

    A plan has `port`, `files`, `settle`, `seconds`, and `rate` or `connections`.
    """
    plan: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    requests = [post(Path(file).read_bytes()) for file in plan["files"]]
    flood = Flood(("127.0.0.1", plan["port"]), requests, settle=plan.get("settle", 0.0))
    gc.disable()
    if "rate" in plan:
        outcomes = flood.open_loop(plan["rate"], plan["seconds"])
    else:
        outcomes = flood.closed_loop(plan["connections"], plan["seconds"])
    print(json.dumps(asdict(outcomes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
