"""Streams of images through both clients."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.vitserve.answers import CAT
from vitserve.client import AsyncClient, Client


async def _numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


def test_stream_takes_asynchronous_images() -> None:
    begun = []

    async def ask(number: int) -> int:
        begun.append(number)
        return number * number

    async def collect() -> list[tuple[int, Any]]:
        async with AsyncClient("http://host") as client:
            return [pair async for pair in client.stream(_numbers(9), ask, concurrency=2)]

    assert asyncio.run(collect()) == [(number, number * number) for number in range(9)]


def test_answers_come_before_later_images() -> None:
    async def ask(number: int) -> int:
        return number

    async def collect() -> None:
        is_answered = asyncio.Event()

        async def images() -> AsyncIterator[int]:
            yield 1
            await is_answered.wait()

        async with AsyncClient("http://host") as client:
            async for _ in client.stream(images(), ask):
                is_answered.set()

    asyncio.run(collect())


def test_error_of_images_follows_answers() -> None:
    async def ask(number: int) -> int:
        return number

    async def images() -> AsyncIterator[int]:
        yield 1
        raise LookupError("no more")

    answered = []

    async def collect() -> None:
        async with AsyncClient("http://host") as client:
            async for pair in client.stream(images(), ask):
                answered.append(pair)

    with pytest.raises(LookupError, match="no more"):
        asyncio.run(collect())
    assert answered == [(1, 1)]


def test_stream_bounds_its_taken_images() -> None:
    taken = []

    async def ask(number: int) -> int:
        return number

    async def images() -> AsyncIterator[int]:
        for number in range(9):
            taken.append(number)
            yield number

    async def collect() -> None:
        async with AsyncClient("http://host") as client:
            async for number, _ in client.stream(images(), ask, concurrency=2):
                assert len(taken) <= number + 4

    asyncio.run(collect())


def test_streams_refuse_the_other_kind() -> None:
    async def collect() -> None:
        async with AsyncClient("http://host") as client:
            async for _ in client.stream([b"x"], len):  # type: ignore[arg-type]
                pass

    with pytest.raises(TypeError, match="is not a coroutine function"):
        asyncio.run(collect())
    with Client(
        "http://host", transport=httpx.MockTransport(lambda _: httpx.Response(200, json=CAT))
    ) as client:
        with pytest.raises(TypeError, match="AsyncClient takes asynchronous ones"):
            list(client.stream(_numbers(1), client.classify))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="pass it to AsyncClient"):
            list(client.stream([b"x"], AsyncClient("http://host").classify))
