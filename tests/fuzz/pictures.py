"""Damaged pictures, sent to every endpoint that takes one."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.fuzz.caller import Answer, Caller, Lost
from tests.fuzz.mutation import case, damaged
from tests.fuzz.tally import Tally
from tests.model.images.test_hostile_images import valid_files
from tests.service.web.apps import form

KIND = "pictures"
MAX_BYTES = 64 << 10
"""Of a file that is a start: of larger ones, fewer could be sent."""
_CALLERS = 4
_PATHS = ("/classify", "/classify?attention=true", "/attention?format=json", "/attention?size=64")


def starts(shared: Path) -> list[bytes]:
    """Return small pictures of every format and the files of the torture folder where it is there, half of each."""
    found = sorted(path for path in (shared / "data" / "torture").rglob("*.*") if path.suffix != ".csv")
    odd = [path.read_bytes() for path in found if path.stat().st_size <= MAX_BYTES]
    # Most odd files are PNG; the other formats are to be damaged as often.
    usual = valid_files()
    return usual * max(1, len(odd) // len(usual)) + odd


def request(files: list[bytes], random: Random) -> bytes:
    """Return one request with a damaged picture, or with up to three."""
    picture = damaged(random.choice(files), files, random)
    kind = random.random()
    if kind < 0.8:
        path = random.choice(_PATHS) if kind < 0.3 else _PATHS[0]
        return _post(path, random.choice(("image/png", "image/jpeg", "application/octet-stream")), picture)
    more = [damaged(random.choice(files), files, random) for _ in range(random.randrange(3))]
    sent = form(picture, *more)
    body = sent["body"]
    if kind > 0.95:
        body = damaged(body, files, random)
    return _post("/classify/batch" if more else "/classify", sent["headers"]["content-type"], body)


def _post(path: str, media_type: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def send(
    port: int, files: list[bytes], seed: int, out: Path, *, seconds: float = math.inf, cases: int | None = None
) -> Tally:
    """Send damaged pictures for `seconds`, or so many `cases`; what was not answered as it should is kept in `out`."""
    tally, numbers, end = Tally(KIND), itertools.islice(itertools.count(), cases), time.monotonic() + seconds
    await asyncio.gather(*(_ask(port, files, seed, numbers, end, tally, out) for _ in range(_CALLERS)))
    return tally


async def _ask(
    port: int, files: list[bytes], seed: int, numbers: Iterator[int], end: float, tally: Tally, out: Path
) -> None:
    caller: Caller | None = None
    for number in numbers:
        if time.monotonic() > end:
            break
        sent = request(files, case(seed, KIND, number))
        tally.sent += 1
        try:
            caller = caller or await Caller.connect(port)
            await caller.send(sent)
            answer = await caller.answer()
            if answer is None:
                raise Lost("closed without an answer")
            good = tally.answered(answer.status, number)
            if fault := _fault(answer):
                tally.faults.append(f"{KIND} {number}: {fault}")
                good = False
        except (Lost, OSError) as error:
            tally.lose(number, error)
            answer, good = None, False
            if isinstance(error, ConnectionRefusedError):  # nobody is there any more
                break
        if not good:
            (out / f"{KIND}-{seed}-{number}.http").write_bytes(sent)
        if caller and (answer is None or answer.is_last):
            caller.close()
            caller = None
    if caller:
        caller.close()


def _fault(answer: Answer) -> str:
    """Return what is wrong with an answer beside its status, or nothing."""
    kind = answer.headers.get("content-type", "")
    wanted = {"application/json", "image/png"} if answer.status < 400 else {"application/problem+json"}
    if kind not in wanted:
        return f"{answer.status} as {kind!r}"
    if kind != "image/png":
        try:
            document = json.loads(answer.body)
        except ValueError:
            return f"{answer.status} with a broken document"
        codes = [item["error"]["code"] for item in document.get("results", ()) if "error" in item]
        if "internal_error" in codes or "inference_failed" in codes:
            return f"a picture of a batch failed: {codes}"
    return ""
