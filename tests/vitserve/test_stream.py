"""Many images through a client: their order, the bounds on what is under way, and errors beside answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.fakes import PATIENCE, on_a_loop
from tests.vitserve.test_client import CAT, FULL, URL
from vitserve.client import AsyncClient, Client, ImageRefused, Retries
from vitserve.documents import Classification


def answer(request: httpx.Request) -> httpx.Response:
    """Classify as a cat, but for what begins with `bad`."""
    if request.content.startswith(b"bad"):
        return httpx.Response(415, json=FULL | {"status": 415, "code": "unsupported_media_type"})
    return httpx.Response(200, json=CAT | {"model": request.content.decode()})


def blocking(handler: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client(URL, transport=httpx.MockTransport(handler), retries=Retries(tries=1))


def asynchronous(handler: Callable[[httpx.Request], httpx.Response]) -> AsyncClient:
    return AsyncClient(URL, transport=httpx.MockTransport(handler), retries=Retries(tries=1))


def write(folder: Path) -> list[Path]:
    names = ["a", "bad", "absent", "d"]
    for name in names:
        if name != "absent":
            (folder / name).write_bytes(name.encode())
    return [folder / name for name in names]


def check(found: list[tuple[Path, object]], files: list[Path]) -> None:
    assert [path for path, _ in found] == files
    first, refused, absent, last = [outcome for _, outcome in found]
    assert isinstance(first, Classification) and first.model == "a"
    assert isinstance(refused, ImageRefused)
    assert isinstance(absent, FileNotFoundError)
    assert isinstance(last, Classification) and last.model == "d"


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_each_file_has_its_answer_or_its_error_in_order(tmp_path: Path, concurrency: int) -> None:
    files = write(tmp_path)
    with blocking(answer) as client:
        check(list(client.stream(files, client.classify, concurrency=concurrency)), files)


@pytest.mark.parametrize("concurrency", [1, 2, 8])
@on_a_loop
async def test_each_file_has_its_answer_or_its_error_in_order_asynchronously(tmp_path: Path, concurrency: int) -> None:
    files = write(tmp_path)
    async with asynchronous(answer) as client:
        check([item async for item in client.stream(files, client.classify, concurrency=concurrency)], files)


class Source:
    """Gives image after image, and notes how many were taken."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0

    def __iter__(self) -> Iterator[bytes]:
        for index in range(self.count):
            self.taken += 1
            yield str(index).encode()


def test_as_many_requests_as_asked_for_are_under_way_at_once() -> None:
    together = threading.Barrier(3)

    def handle(request: httpx.Request) -> httpx.Response:
        together.wait(PATIENCE)  # passes only while three requests wait here at once
        return answer(request)

    with blocking(handle) as client:
        assert len(list(client.stream(Source(9), client.classify, concurrency=3))) == 9


def test_images_are_taken_as_there_is_room() -> None:
    source = Source(1000)
    with blocking(answer) as client:
        answers = iter(client.stream(source, client.classify, concurrency=2))
        for given in range(1, 10):
            next(answers)
            assert source.taken <= given + 3
        answers.close()  # type: ignore[attr-defined]  # it is a generator
    assert source.taken < 20


@on_a_loop
async def test_a_stream_that_is_closed_ends_the_requests_under_way() -> None:
    begun = asyncio.Event()
    under_way: list[bytes] = []
    cancelled: list[bytes] = []

    async def ask(image: bytes) -> None:
        if image == b"0":
            return
        under_way.append(image)
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(image)
            raise

    async with asynchronous(answer) as client:
        answers = client.stream(Source(9), ask, concurrency=2)
        await anext(answers)
        await begun.wait()
        await answers.aclose()  # type: ignore[attr-defined]  # it is a generator
    assert cancelled == under_way
