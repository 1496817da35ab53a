"""Damaged streams of HTTP requests: at the protocol in this process, and over a socket, with one number of answers.

The protocol in this process says how many whole requests a stream has, and whether the connection closes behind them;
the server must answer as many.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.fuzz.caller import Caller, Lost
from tests.fuzz.mutation import case, damaged
from tests.fuzz.tally import Tally
from tests.service.http.raw_forms import FORMS
from tests.service.http.wire import Wire

KIND = "streams"
_CALLERS = 32
_MAX_BYTES = 6_000
_FORMS = [form.sent for form in FORMS.values() if len(form.sent) <= _MAX_BYTES]
_TOKENS = (
    *(b"\r\n", b"\n", b"\r", b"\0", b"\x80", b" ", b"\t", b":", b"0", b"\r\n\r\n", b"0\r\n\r\n", b"%", b"?", b"#"),
    *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: y\r\n"),
    *(b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n"),
    *(b"HTTP/1.0", b"HTTP/1.1", b"HEAD", b"CONNECT ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
)


def stream(random: Random) -> list[bytes]:
    """Return the pieces of one stream: arbitrary bytes, or one to four requests, mostly damaged."""
    if random.random() < 0.1:
        data = random.randbytes(random.randrange(1, 300))
    else:
        data = b"".join(random.choices(_FORMS, k=random.choice((1, 1, 2, 4))))
        for _ in range(random.choice((0, 1, 1, 2, 4))):
            place = random.randrange(len(data) + 1)
            data = data[:place] + random.choice(_TOKENS) + data[place + random.choice((0, 0, 1, 4)) :]
        if random.random() < 0.4:
            data = damaged(data, _FORMS, random) or b"\r"
    edges = sorted({0, len(data), *(random.randrange(len(data) + 1) for _ in range(random.choice((0, 0, 1, 3))))})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


async def parse(pieces: list[bytes], tally: Tally, number: int) -> tuple[list[str], bool] | None:
    """Return the methods of the whole requests of a stream, and whether the connection closes; None where it fails."""
    try:
        wire = Wire()
        for piece in pieces:
            await wire.send(piece)
        for status in wire.statuses:
            tally.answered(status, number)
        found = [method for method, _, _ in wire.requests], wire.socket.closed
    except Exception as error:  # noqa: BLE001 - whatever the protocol raises is what is looked for
        tally.lose(number, repr(error))
        return None
    return found


async def converse(port: int, pieces: list[bytes], methods: list[str], closes: bool) -> list[int]:
    """Send a stream to the server, and return the statuses of its answers.

    Raises:
        Lost: fewer than there are requests, or the connection stays open though it should close.
    """
    caller = await Caller.connect(port)
    statuses: list[int] = []
    try:
        for piece in pieces:
            await caller.send(piece)
        last = False
        while closes or len(statuses) < len(methods):
            answer = await caller.answer(to_head=methods[len(statuses) : len(statuses) + 1] == ["HEAD"])
            if answer is None:
                break
            statuses.append(answer.status)
            last = answer.is_last
        if len(statuses) < len(methods) and not last:
            raise Lost(f"{len(statuses)} answers to {len(methods)} requests")
    finally:
        caller.close()
    return statuses


async def send(port: int, seed: int, out: Path, *, seconds: float = math.inf, cases: int | None = None) -> list[Tally]:
    """Send streams for `seconds`, or so many `cases`; what was not answered as it should is kept in `out`."""
    parser, sockets = Tally("parser"), Tally("sockets")
    numbers, end = itertools.islice(itertools.count(), cases), time.monotonic() + seconds
    await asyncio.gather(*(_converse(port, seed, numbers, end, parser, sockets, out) for _ in range(_CALLERS)))
    return [parser, sockets]


async def _converse(
    port: int, seed: int, numbers: Iterator[int], end: float, parser: Tally, sockets: Tally, out: Path
) -> None:
    for number in numbers:
        if time.monotonic() > end:
            return
        pieces = stream(case(seed, KIND, number))
        parser.sent += 1
        expected = await parse(pieces, parser, number)
        sockets.sent += 1
        good = expected is not None
        try:
            for status in await converse(port, pieces, *(expected or ([], False))):
                good = sockets.answered(status, number) and good
        except (Lost, OSError) as error:
            sockets.lose(number, error)
            if isinstance(error, ConnectionRefusedError):  # nobody is there any more
                return
            good = False
        if not good:
            (out / f"{KIND}-{seed}-{number}.http").write_bytes(b"".join(pieces))
