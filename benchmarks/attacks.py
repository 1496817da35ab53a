"""What hostile callers send to a service, for `benchmarks.reliability`: `ATTACKS`, and the honest
callers beside them.

Those of a kind have an address of their own in 127.0.0.0/8 (Linux), so to the service they are one
caller. The hostile have a process of their own, `python -m benchmarks.attacks NAME URL SECONDS`:
what they do between their requests would delay the honest ones.
"""

import asyncio
import functools
import io
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.load import arrivals
from benchmarks.servers import free_port

HOSTILE = "127.0.0.2"
# That the hostile lack; only the service `keys` looks at it.
KEY = "honest"
# Name of the model of a service that has one.
MODEL = "served"
# Seconds: the service promises an answer within VIT_REQUEST_TIMEOUT (10 s) and a little.
_PATIENCE = 13.0

Ask = Callable[[httpx.AsyncClient, int], Awaitable[str]]
"""Sends the request of a number, and returns the status of its answer, or how else it ended."""


def client_of(url: str, address: str) -> httpx.AsyncClient:
    """Return a client of an address of its own, with as many connections as it needs; the hostile
    alone lack a key.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2)
    transport = httpx.AsyncHTTPTransport(local_address=address, limits=limits)
    headers = {} if address == HOSTILE else {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=url, timeout=_PATIENCE, transport=transport, headers=headers)


@dataclass
class Callers:
    """Callers of one address, whose answers are counted, and not compared.

    Attributes:
        ask: what they send.
        rate: requests a second, whatever is answered.
        count: how many ask again when they are answered.
        least: the mark of what is answered of all; 0: there is none.
        counts: by status, or by the error where there was no answer.
    """

    ask: Ask
    address: str
    rate: float = 0.0
    count: int = 0
    least: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{self.counts['200']} of {self.counts.total()}"

    async def run(self, url: str, seconds: float) -> None:
        """Send for some seconds, then wait for the answers."""
        numbers, end = itertools.count(), time.monotonic() + seconds

        async def once(client: httpx.AsyncClient) -> None:
            try:
                outcome = await self.ask(client, next(numbers))
            except (httpx.HTTPError, OSError) as error:
                outcome = type(error).__name__
            self.counts[outcome] += 1

        async def again(client: httpx.AsyncClient) -> None:
            while time.monotonic() < end:
                await once(client)
                await asyncio.sleep(0.01)

        async with client_of(url, self.address) as client, asyncio.TaskGroup() as group:
            for _ in range(self.count):
                group.create_task(again(client))
            if self.rate:
                async for _ in arrivals(self.rate, seconds, self.address):
                    group.create_task(once(client))


def post(content: bytes, path: str = "/classify", **options: Any) -> Ask:
    """Return a request whose body is this."""

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        return str((await client.post(path, content=content, **options)).status_code)

    return ask


def batch(picture: bytes, query: str = "") -> Ask:
    """Return a request with 64 of these."""
    form = httpx.Request("POST", "http://any", files=[("file", ("a", picture))] * 64)
    return post(
        form.read(),
        f"/classify/batch{query}",
        headers={"Content-Type": form.headers["Content-Type"]},
    )


def labelled(count: int, word: str) -> Ask:
    """Return requests for the best of labels that nobody has asked for before."""
    picture = flat("JPEG", 300)

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        labels = ",".join(f"{word} {number} {each}" for each in range(count))
        return str(
            (await client.post("/classify", content=picture, params={"labels": labels})).status_code
        )

    return ask


def raw(headers: bytes, pieces: Iterable[bytes], pause: float = 0.0) -> Ask:
    """Return a request on a connection of its own, whose body comes in pieces, each some seconds
    after the other.
    """
    head = b"POST /classify HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n\r\n"
    sent = [head, *pieces]

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", client.base_url.port, local_addr=(HOSTILE, 0)
        )
        try:
            for piece in sent:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            return (await asyncio.wait_for(reader.read(4096), _PATIENCE))[9:12].decode() or "closed"
        finally:
            writer.close()

    return ask


def slow_reader(piece_bytes: int, pause: float) -> Ask:
    """Return a request for a large map, whose answer is read in pieces, each some seconds after the
    other.

    The picture is smooth noise: a small body whose drawn map is large, so that answers are what
    fills memory.
    """
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((2048, 2048), Image.Resampling.BICUBIC).save(
        buffer, "JPEG", quality=30
    )
    picture = buffer.getvalue()
    head = b"POST /attention?size=2048&view=photo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    sent = head % len(picture) + picture

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        port = client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(HOSTILE, 0))
        try:
            writer.write(sent)
            first = await asyncio.wait_for(reader.read(piece_bytes), _PATIENCE)
            piece = first
            while piece:
                await asyncio.sleep(pause)
                piece = await reader.read(piece_bytes)
            return first[9:12].decode() or "closed"
        finally:
            writer.close()

    return ask


def grpc_port() -> int:
    """Return the port of gRPC of the services that are attacked, one after the other, from all
    processes.
    """
    return int(os.environ.setdefault("VITSERVE_BENCHMARK_GRPC_PORT", str(free_port())))


def grpc(messages: Iterable[bytes]) -> Ask:
    """Return calls of ModelInfer with these messages in turn, each on a connection of its own;
    needs grpcio.
    """
    from grpc import aio  # noqa: PLC0415  an optional package

    turn = itertools.cycle(messages)

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        async with aio.insecure_channel(f"127.0.0.1:{grpc_port()}") as channel:
            try:
                await channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
                    next(turn), timeout=_PATIENCE
                )
            except aio.AioRpcError as error:
                return str(error.code().name)
        return "200"

    return ask


def grpc_labels() -> Ask:
    """Return calls with so many commas for labels: more than is read, and nearly as many as are."""
    from service.extensions.inference_protocol.grpc.open_inference_pb2 import (  # noqa: PLC0415  needs protobuf
        InferParameter,
        ModelInferRequest,
    )

    image = ModelInferRequest.InferInputTensor(name="image", datatype="BYTES", shape=[1])
    picture = flat("JPEG", 300)
    raw_picture = len(picture).to_bytes(4, "little") + picture
    parameters = (
        {"labels": InferParameter(string_param="," * count)} for count in (3_000_000, 990_000)
    )
    requests = (
        ModelInferRequest(
            model_name=MODEL, inputs=[image], parameters=each, raw_input_contents=[raw_picture]
        )
        for each in parameters
    )
    return grpc([each.SerializeToString() for each in requests])


def flat(kind: str, side: int, **options: Any) -> bytes:
    """Return a square picture of one colour in a format of Pillow's."""
    buffer = io.BytesIO()
    Image.new("I;16" if kind == "PNG" else "RGB", (side, side)).save(buffer, kind, **options)
    return buffer.getvalue()


@functools.cache
def heic() -> bytes:
    """Return a photo of 12 megapixels as phones take it; needs pillow-heif."""
    import pillow_heif  # noqa: PLC0415  an optional package

    pillow_heif.register_heif_opener()
    noise = np.random.default_rng(0).integers(0, 256, (189, 252, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((4032, 3024), Image.Resampling.BICUBIC).save(
        buffer, "HEIF", quality=60
    )
    return buffer.getvalue()


def _avif() -> bytes:
    return flat("AVIF", 7990, quality=30)  # 64 megapixels in 1.6 kB


def _tiny_chunks() -> Ask:
    return raw(b"Transfer-Encoding: chunked", [b"1\r\nx\r\n" * 10_000] * 20)


def _escaped_json() -> Ask:
    body = b'{"image": "' + b"\\n" * 1_500_000 + b'"}'
    return raw(b"Content-Type: application/json\r\nContent-Length: %d" % len(body), [body])


@dataclass(frozen=True)
class Attack:
    """One way to hurt a service.

    Attributes:
        make: returns what is sent, which may take seconds to make.
        count, rate: see `Callers`.
        share: a rate, as a share of what the service answers to eight callers; all are to be
        answered.
        beside: kinds of `OTHERS` beside those who send JPEGs.
        service: of `benchmarks.reliability`, which is attacked.
    """

    make: Callable[[], Ask]
    count: int = 4
    rate: float = 0.0
    share: float = 0.0
    beside: tuple[str, ...] = ("webp", "heic")
    service: str = "vit"

    async def callers(self, url: str) -> Callers:
        """Return those who attack."""
        ask = await asyncio.to_thread(self.make)
        if not self.share:
            return Callers(ask, HOSTILE, self.rate, self.count)
        most, began = Callers(ask, HOSTILE, count=8), time.monotonic()
        await most.run(url, 8)
        rate = self.share * most.counts["200"] / (time.monotonic() - began)
        return Callers(ask, HOSTILE, rate, least=1)


_MAPS = "/attention?class=0,1,2,3,4,5,6,7&size=2048&view=photo"
# The field `model_name` of a message.
_NAME = b"\x0a\x01a"

OTHERS = {
    "webp": lambda: Callers(post(flat("WEBP", 600, quality=80)), "127.0.0.3", rate=2, least=0.95),
    "heic": lambda: Callers(post(heic()), "127.0.0.4", rate=0.5, least=0.95),
    "maps": lambda: Callers(post(flat("JPEG", 300), "/attention"), "127.0.0.5", rate=2),
    "labels": lambda: Callers(labelled(2, "pet"), "127.0.0.6", rate=2),
}

ATTACKS = {
    "heic-5": Attack(lambda: post(heic()), count=0, rate=5),
    "heic-30": Attack(lambda: post(heic()), count=0, rate=30),
    "heic-80": Attack(lambda: post(heic()), share=0.8, beside=()),
    "avif-batches": Attack(lambda: batch(_avif())),
    # One caller with 32 under way.
    "avif-single": Attack(lambda: post(_avif()), count=32),
    "tiff-batches": Attack(lambda: batch(flat("TIFF", 1200, compression="tiff_lzw"))),
    # 49 megapixels of 16 bits; the callers leave after a second.
    "large-png": Attack(lambda: post(flat("PNG", 7000), timeout=1)),
    "drawings": Attack(lambda: post(flat("JPEG", 300), _MAPS), count=64, beside=("webp", "maps")),
    # A byte a second of a body that never comes.
    "crawlers": Attack(lambda: raw(b"Content-Length: 100000", [b"x"] * 6, pause=1), count=300),
    # 80 KiB of some megabytes in 10 s.
    "slow-readers": Attack(
        lambda: slow_reader(80 << 10, pause=10), count=300, beside=("webp", "maps")
    ),
    # 3 MB of line breaks as base64.
    "escaped-json": Attack(_escaped_json),
    "tiny-chunks": Attack(_tiny_chunks),
    "tiny-chunks-without-key": Attack(_tiny_chunks, service="keys"),
    "grpc-names": Attack(
        lambda: grpc([_NAME * 1_000_000, _NAME * 900]), count=16, service="models"
    ),
    "grpc-labels": Attack(grpc_labels, count=16, beside=("labels",), service="clip"),
    "texts": Attack(lambda: labelled(66, "label"), count=60, beside=("labels",), service="clip"),
    "relevance-batches": Attack(
        lambda: batch(flat("JPEG", 300), "?attention=relevance&labels=cat,dog"),
        beside=("labels",),
        service="clip",
    ),
}


async def attack(name: str, url: str, seconds: float) -> asyncio.subprocess.Process:
    """Return a process that attacks once it reads a line: what it sends is made."""
    command = [sys.executable, "-m", "benchmarks.attacks", name, url, str(seconds)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None, "it is a pipe"
    await process.stdout.readline()
    return process


async def attacked(process: asyncio.subprocess.Process) -> Callers:
    """Let it attack, and return those who did."""
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
