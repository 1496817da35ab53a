"""The attacks of `benchmarks.reliability`, and the honest callers that ask at the same time.

Hostile callers run in a process of their own, `python -m benchmarks.attacks NAME URL SECONDS`:
their work between requests would delay the honest callers.
"""

import asyncio
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.attack_calls import grpc, grpc_message, silent_call
from benchmarks.attack_requests import (
    HOSTILE,
    LARGE_HEAD,
    MODELS,
    Ask,
    Callers,
    avif,
    batch,
    escaped_json,
    flat,
    hang_ups,
    heic,
    kept_picture,
    labelled,
    model_names,
    models_in_turn,
    post,
    raw,
    relabels,
    slow_reader,
    small_picture,
    teach,
    tiny_chunks,
)


@dataclass(frozen=True)
class Attack:
    """One way to hurt a service.

    Attributes:
        make: returns the requests, which may take seconds to make.
        count, rate: see `Callers`.
        share: a rate, as a share of the rate at which the service answers eight callers; all
            requests are to be answered.
        beside: kinds of `OTHERS` that ask at the same time.
        service: kind of the attacked service, see `benchmarks.attacked_services`.
        needs: a package that the attack or its service needs.
    """

    make: Callable[[], Ask]
    count: int = 4
    rate: float = 0.0
    share: float = 0.0
    beside: tuple[str, ...] = ("webp", "heic")
    service: str = "vit"
    needs: str | None = None

    async def callers(self, url: str) -> Callers:
        """Return the hostile callers."""
        ask = await asyncio.to_thread(self.make)
        if not self.share:
            return Callers(ask, HOSTILE, self.rate, self.count)
        eight = Callers(ask, HOSTILE, count=8)
        began = time.monotonic()
        await eight.run(url, 8)
        rate = self.share * eight.counts["200"] / (time.monotonic() - began)
        return Callers(ask, HOSTILE, rate, least=1)

    @property
    def lacking(self) -> list[str]:
        """Return the packages that this attack needs and that are not installed."""
        needed = ["pillow_heif"] if "heic" in self.beside else []
        if self.needs is not None:
            needed.append(self.needs)
        return [name for name in needed if importlib.util.find_spec(name) is None]


_MAPS = "/attention?class=0,1,2,3,4,5,6,7&size=2048&view=photo"
# The field `model_name` of a message.
_NAME = b"\x0a\x01a"

OTHERS = {
    "webp": lambda: Callers(post(flat("WEBP", 600, quality=80)), "127.0.0.3", rate=2, least=0.95),
    "heic": lambda: Callers(post(heic()), "127.0.0.4", rate=0.5, least=0.95),
    "maps": lambda: Callers(post(flat("JPEG", 300), "/attention"), "127.0.0.5", rate=2),
    "labels": lambda: Callers(labelled(2, "pet"), "127.0.0.6", rate=2),
    "grpc": lambda: Callers(
        grpc([grpc_message()], "127.0.0.7"), "127.0.0.7", rate=5, least=0.95, longest=3
    ),
    "teacher": lambda: Callers(teach("honest"), "127.0.0.8", rate=1, least=0.95),
    # Without a mark, because these callers share the memory of models with the attackers.
    "other-model": lambda: Callers(models_in_turn(MODELS[1:2]), "127.0.0.9", rate=2),
}
"""Honest callers of other requests than JPEGs, by kind."""

ATTACKS = {
    "heic-5": Attack(lambda: post(heic()), count=0, rate=5),
    "heic-30": Attack(lambda: post(heic()), count=0, rate=30),
    "heic-80": Attack(lambda: post(heic()), share=0.8, beside=(), needs="pillow_heif"),
    "avif-batches": Attack(lambda: batch(avif())),
    # One caller with 32 requests in flight.
    "avif-single": Attack(lambda: post(avif()), count=32),
    "tiff-batches": Attack(lambda: batch(flat("TIFF", 1200, compression="tiff_lzw"))),
    # 49 megapixels of 16 bits; the callers leave after a second.
    "large-png": Attack(lambda: post(flat("PNG", 7000), timeout=1)),
    "drawings": Attack(lambda: post(flat("JPEG", 300), _MAPS), count=64, beside=("webp", "maps")),
    # A byte a second of a body that never ends.
    "crawlers": Attack(lambda: raw(b"Content-Length: 100000", [b"x"] * 6, pause=1), count=300),
    # 80 KiB of some megabytes in 10 s.
    "slow-readers": Attack(
        lambda: slow_reader(80 << 10, pause=10), count=300, beside=("webp", "maps")
    ),
    "escaped-json": Attack(escaped_json),
    "tiny-chunks": Attack(tiny_chunks),
    "tiny-chunks-without-key": Attack(tiny_chunks, service="keys"),
    # 120 calls wait at once for a message that never comes.
    "silent-calls": Attack(silent_call, count=0, rate=12, beside=("webp", "grpc"), needs="grpc"),
    "grpc-names": Attack(
        lambda: grpc([_NAME * 1_000_000, _NAME * 900]), count=16, service="models", needs="grpc"
    ),
    # Two backbones of one preprocessing keep the same picture.
    "shared-pictures": Attack(lambda: kept_picture(MODELS[:2]), beside=("webp",), service="models"),
    # The memory of models holds the default model and one other, which stays for 30 s.
    "tight-models": Attack(
        lambda: models_in_turn(MODELS[1:]),
        count=0,
        rate=5,
        beside=("webp", "other-model"),
        service="tight",
    ),
    # More labels than are read, and nearly as many as are.
    "grpc-labels": Attack(
        lambda: grpc([grpc_message("," * count) for count in (3_000_000, 990_000)]),
        count=16,
        beside=("labels",),
        service="clip",
        needs="grpc",
    ),
    "texts": Attack(lambda: labelled(66, "label"), count=60, beside=("labels",), service="clip"),
    "relevance-batches": Attack(
        lambda: batch(flat("JPEG", 300), "?attention=relevance&labels=cat,dog"),
        beside=("labels",),
        service="clip",
    ),
    "model-names": Attack(model_names, count=16, beside=("webp", "teacher"), service="teach"),
    "head-scores": Attack(
        lambda: post(small_picture(0), "/classify?model=*"),
        count=8,
        beside=("webp", "teacher"),
        service="teach",
    ),
    "example-hang-ups": Attack(
        lambda: hang_ups(f"/heads/{LARGE_HEAD}/examples"),
        count=0,
        rate=19,
        beside=("webp", "teacher"),
        service="teach",
    ),
    # Each one asks for another fit. The fits outlast the attack, so it comes last.
    "relabels": Attack(relabels, count=0, rate=9, beside=("webp", "teacher"), service="teach"),
}


async def attack(name: str, url: str, seconds: float) -> asyncio.subprocess.Process:
    """Return a process with ready requests, which attacks after it reads a line."""
    command = [sys.executable, "-m", "benchmarks.attacks", name, url, str(seconds)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None, "it is a pipe"
    await process.stdout.readline()
    return process


async def attacked(process: asyncio.subprocess.Process) -> Callers:
    """Start the attack of a process, and return its callers at the end."""
    output, _ = await process.communicate(b"\n")
    counts, least = json.loads(output)
    return Callers(post(b""), HOSTILE, least=least, counts=Counter(counts))


async def _main(name: str, url: str, seconds: float) -> None:
    callers = await ATTACKS[name].callers(url)
    print(flush=True)
    sys.stdin.readline()
    await callers.run(url, seconds)
    print(json.dumps([callers.counts, callers.least]))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
