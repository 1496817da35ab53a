"""The requests of `benchmarks.attacks`, and callers that send them from their own address.

Each kind of caller has an address of its own in 127.0.0.0/8 (Linux), so the service sees each kind
as one caller.
"""

import asyncio
import functools
import io
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.load import arrivals

HOSTILE = "127.0.0.2"
# Hostile callers lack this key; only the service `keys` asks for it.
KEY = "honest"
# Name of the model of a service that has only one.
MODEL = "served"

# Models of the services with several; the first is the default model.
MODELS = ("first", "other", "third", "fourth")

# Heads of the service `teach`, which relabels change.
HEADS = tuple(f"head-{number:02}" for number in range(60))
EXAMPLES = 64
LABELS = ("cat", "dog")
# A head with so many examples that each score compares a picture with 2,000 of them.
LARGE_HEAD = "large"
LARGE_EXAMPLES = 2000

# Seconds; the service promises an answer within VIT_REQUEST_TIMEOUT (10 s) and a little.
PATIENCE = 13.0

Ask = Callable[[httpx.AsyncClient, int], Awaitable[str]]
"""Sends the request of a number, and returns the status of its answer or another outcome."""


def client_of(url: str, address: str) -> httpx.AsyncClient:
    """Return a client of an address, with as many connections as it needs.

    Only hostile clients lack the key.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2)
    transport = httpx.AsyncHTTPTransport(local_address=address, limits=limits)
    headers = {} if address == HOSTILE else {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE, transport=transport, headers=headers)


@dataclass
class Callers:
    """Callers of one address; their answers are counted, and not compared.

    Attributes:
        ask: sends one request.
        rate: requests a second, regardless of the answers.
        count: number of callers that ask again after each answer.
        least: mark for the share of requests answered 200; 0 means no mark.
        longest: mark for the median, as a multiple of the quiet median; 0 means no mark.
        counts: requests by status, or by error without an answer.
        seconds: time of each answer 200.
    """

    ask: Ask
    address: str
    rate: float = 0.0
    count: int = 0
    least: float = 0.0
    longest: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        answered = f"{self.counts['200']} of {self.counts.total()}"
        if not self.seconds:
            return answered
        return f"{answered} ({self.median_ms:.0f} ms)"

    @property
    def median_ms(self) -> float:
        """Return the median time of an answer 200, in milliseconds."""
        return 1e3 * float(np.median(self.seconds)) if self.seconds else float("nan")

    async def run(self, url: str, seconds: float) -> None:
        """Send for some seconds, then wait for the answers."""
        numbers = itertools.count()
        end = time.monotonic() + seconds

        async def once(client: httpx.AsyncClient) -> None:
            began = time.monotonic()
            try:
                outcome = await self.ask(client, next(numbers))
            except (httpx.HTTPError, OSError) as error:
                outcome = type(error).__name__
            self.counts[outcome] += 1
            if outcome == "200":
                self.seconds.append(time.monotonic() - began)

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


# Pictures


def flat(kind: str, side: int, **options: Any) -> bytes:
    """Return a square picture of one colour in a format of Pillow's."""
    buffer = io.BytesIO()
    Image.new("I;16" if kind == "PNG" else "RGB", (side, side)).save(buffer, kind, **options)
    return buffer.getvalue()


def noise(kind: str, size: tuple[int, int], grain: int = 1, **options: Any) -> bytes:
    """Return a picture of smooth noise.

    Args:
        grain: pixels of the side of one random square.
    """
    width, height = size
    pixels = np.random.default_rng(0).integers(
        0, 256, (height // grain, width // grain, 3), dtype=np.uint8
    )
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def small_picture(number: int) -> bytes:
    """Return a JPEG of 32 pixels whose features no other number has."""
    pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@functools.cache
def heic() -> bytes:
    """Return a photo of 12 megapixels as phones take it; needs pillow-heif."""
    import pillow_heif  # noqa: PLC0415  an optional package

    pillow_heif.register_heif_opener()
    return noise("HEIF", (4032, 3024), grain=16, quality=60)


def avif() -> bytes:
    """Return 64 megapixels in 1.6 kB."""
    return flat("AVIF", 7990, quality=30)


# Requests over HTTP


def post(content: bytes, path: str = "/classify", **options: Any) -> Ask:
    """Return a POST with this body."""

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        return str((await client.post(path, content=content, **options)).status_code)

    return ask


def form_of(files: Sequence[bytes], **fields: str) -> tuple[bytes, dict[str, str]]:
    """Return the body and the request headers of a form with these files and fields."""
    parts: list[tuple[str, Any]] = [("file", ("a", file)) for file in files]
    parts += [(name, (None, value.encode())) for name, value in fields.items()]
    form = httpx.Request("POST", "http://any", files=parts)
    return form.read(), {"Content-Type": form.headers["Content-Type"]}


def batch(picture: bytes, query: str = "") -> Ask:
    """Return a request with 64 copies of a picture."""
    content, headers = form_of([picture] * 64)
    return post(content, f"/classify/batch{query}", headers=headers)


def labelled(count: int, word: str) -> Ask:
    """Return requests with labels that no request had before."""
    picture = flat("JPEG", 300)

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        labels = ",".join(f"{word} {number} {index}" for index in range(count))
        answer = await client.post("/classify", content=picture, params={"labels": labels})
        return str(answer.status_code)

    return ask


def model_names() -> Ask:
    """Return requests without a picture that name many models, in the address and in a form."""
    known = f"/classify?model={','.join([MODELS[0], *HEADS])}"
    repeated = f"/classify?model={','.join([MODELS[0]] * 10_000)}"
    content, headers = form_of([], model=",".join([MODELS[0]] * 40_000))
    turn = itertools.cycle(
        [post(b"", repeated), post(b"", known), post(content, "/classify", headers=headers)]
    )

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        return await next(turn)(client, number)

    return ask


def hang_ups(path: str) -> Ask:
    """Return requests whose callers leave after up to 50 ms."""

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        try:
            async with asyncio.timeout(random.Random(number).uniform(0, 0.05)):
                return str((await client.get(path)).status_code)
        except TimeoutError:
            return "left"

    return ask


def relabels() -> Ask:
    """Return requests that each move an example of the next head to the other label."""

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        turn, head = divmod(number, len(HEADS))
        example = 1 + turn % EXAMPLES
        # The first half has the first label.
        label = LABELS[(turn // EXAMPLES + (example <= EXAMPLES // 2)) % 2]
        path = f"/heads/{HEADS[head]}/examples/{example}"
        return str((await client.put(path, params={"label": label})).status_code)

    return ask


def teach(head: str) -> Ask:
    """Return requests that each teach a head a new picture."""

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        answer = await client.post(
            f"/heads/{head}/examples",
            content=small_picture(10**6 + number),
            params={"label": LABELS[number % 2]},
        )
        return "200" if answer.status_code == 201 else str(answer.status_code)

    return ask


def models_in_turn(names: Sequence[str]) -> Ask:
    """Return requests that each ask the next model."""
    picture = flat("JPEG", 300)

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        params = {"model": names[number % len(names)]}
        return str((await client.post("/classify", content=picture, params=params)).status_code)

    return ask


def kept_picture(names: Sequence[str]) -> Ask:
    """Return requests of several models, whose picture is then found by its id.

    The outcome is `not kept` if the answer lacks an id, or if the id is unknown.
    """
    picture = flat("JPEG", 300)

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        params = {"model": ",".join(names)}
        answer = await client.post("/classify", content=picture, params=params)
        if answer.status_code != 200:
            return str(answer.status_code)
        document = answer.json()
        if "id" not in document:
            return "not kept"
        if number % 16:  # a map takes longer than the answer
            return "200"
        params = {"id": document["id"], "model": names[number // 16 % len(names)]}
        status = (await client.get("/attention", params=params)).status_code
        return "not kept" if status == 404 else str(status)

    return ask


# Requests on a connection of their own


def raw(headers: bytes, pieces: Iterable[bytes], pause: float = 0.0) -> Ask:
    """Return a request on its own connection, whose body comes in pieces.

    Args:
        pause: seconds after each piece.
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
            return (await asyncio.wait_for(reader.read(4096), PATIENCE))[9:12].decode() or "closed"
        finally:
            writer.close()

    return ask


def tiny_chunks() -> Ask:
    """Return a request with 200,000 chunks of one byte."""
    return raw(b"Transfer-Encoding: chunked", [b"1\r\nx\r\n" * 10_000] * 20)


def escaped_json() -> Ask:
    """Return a request with 3 MB of escaped line breaks as base64."""
    body = b'{"image": "' + b"\\n" * 1_500_000 + b'"}'
    return raw(b"Content-Type: application/json\r\nContent-Length: %d" % len(body), [body])


def slow_reader(piece_bytes: int, pause: float) -> Ask:
    """Return a request for a large map, whose answer is read slowly.

    The picture is smooth noise: its body is small, and its drawn map is large, so the answers fill
    the memory.

    Args:
        piece_bytes: bytes read at once.
        pause: seconds between reads.
    """
    picture = noise("JPEG", (2048, 2048), grain=8, quality=30)
    path = b"/attention?size=2048&view=photo"
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    sent = head % (path, len(picture)) + picture

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        port = client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(HOSTILE, 0))
        try:
            writer.write(sent)
            first = await asyncio.wait_for(reader.read(piece_bytes), PATIENCE)
            piece = first
            while piece:
                await asyncio.sleep(pause)
                piece = await reader.read(piece_bytes)
            return first[9:12].decode() or "closed"
        finally:
            writer.close()

    return ask
