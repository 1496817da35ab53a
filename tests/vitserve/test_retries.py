"""When a request is sent again, after which pause, and when no more; with a clock that only moves when they pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.vitserve.test_client import FULL, URL
from vitserve.client import AsyncClient, Client, ClientError, Retries

Step = int | Exception | tuple[int, str]
"""A status, a status with Retry-After, or an error in place of an answer."""


class Scripted:
    """Answers with one step after another, and is the clock that the pauses move."""

    def __init__(self, *steps: Step, took: float = 0.0) -> None:
        self.steps, self.took = list(steps), took
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.now += self.took
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        status, headers = (step, {}) if isinstance(step, int) else (step[0], {"Retry-After": step[1]})
        answer = {"model": "tiny", "labels": ["cat"]} if status == 200 else FULL | {"status": status}
        return httpx.Response(status, json=answer, headers=headers)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)


def labels_blocking(server: Scripted, requests: int = 1, **retries: Any) -> list[str]:
    policy = Retries(clock=lambda: server.now, **{"jitter": lambda: 0.0, **retries})
    with Client(URL, transport=httpx.MockTransport(server), retries=policy, sleep=server.sleep) as client:
        for _ in range(requests):
            found = client.labels()
    return found


def labels_asynchronous(server: Scripted, requests: int = 1, **retries: Any) -> list[str]:
    async def ask() -> list[str]:
        policy = Retries(clock=lambda: server.now, **{"jitter": lambda: 0.0, **retries})
        transport = httpx.MockTransport(server)
        async with AsyncClient(URL, transport=transport, retries=policy, sleep=server.asleep) as client:
            for _ in range(requests):
                found = await client.labels()
        return found

    return asyncio.run(ask())


Ask = Callable[..., list[str]]


@pytest.fixture(params=[labels_blocking, labels_asynchronous], ids=["Client", "AsyncClient"])
def ask(request: pytest.FixtureRequest) -> Ask:
    found: Ask = request.param
    return found


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_kept_and_never_undercut(ask: Ask, status: int) -> None:
    server = Scripted((status, "7"), (status, "0"), 200)
    assert ask(server) == ["cat"]
    assert server.pauses == [7, 0]


def test_callers_that_are_refused_together_come_back_apart(ask: Ask) -> None:
    server = Scripted((503, "7"), (503, "7"), 503, 200)
    assert ask(server, jitter=lambda: 0.5) == ["cat"]
    assert server.pauses == [7 + 0.125, 7 + 0.25, 0.75]


def test_without_retry_after_the_pause_doubles_up_to_eight_seconds(ask: Ask) -> None:
    server = Scripted(*[503] * 8, 200)
    assert ask(server, tries=9, jitter=lambda: 1.0) == ["cat"]
    assert server.pauses == [0.25, 0.5, 1, 2, 4, 8, 8, 8]


def test_tries_are_bounded(ask: Ask) -> None:
    server = Scripted(*[503] * 5)
    with pytest.raises(ClientError, match="queue_full"):
        ask(server)
    assert len(server.pauses) == 4
    assert server.steps == []


def test_a_pause_that_would_last_too_long_is_not_begun(ask: Ask) -> None:
    server = Scripted((503, "20"), (503, "20"), 200, took=6)
    with pytest.raises(ClientError, match="queue_full"):
        ask(server, seconds=50)
    assert server.pauses == [20]
    assert server.now == 32


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 415, 422, 500, 504])
def test_other_refusals_are_final(ask: Ask, status: int) -> None:
    server = Scripted((status, "1"))
    with pytest.raises(ClientError):
        ask(server)
    assert server.pauses == []


@pytest.mark.parametrize(
    "error",
    [httpx.ReadError("reset"), httpx.WriteError("broken pipe"), httpx.RemoteProtocolError("disconnected")],
    ids=lambda error: type(error).__name__,
)
def test_a_connection_that_broke_is_tried_again(ask: Ask, error: Exception) -> None:
    server = Scripted(error, 200)
    assert ask(server) == ["cat"]
    assert server.pauses == [0.125]


@pytest.mark.parametrize(
    "error",
    [httpx.ReadTimeout("silence"), httpx.UnsupportedProtocol("no scheme"), httpx.ConnectError("refused")],
    ids=lambda error: type(error).__name__,
)
def test_silence_and_a_wrong_address_are_final(ask: Ask, error: Exception) -> None:
    server = Scripted(error)
    with pytest.raises(ClientError):
        ask(server)
    assert server.pauses == []


def test_a_server_that_starts_again_is_waited_for(ask: Ask) -> None:
    server = Scripted(200, httpx.ConnectError("refused"), httpx.ConnectError("refused"), 200)
    assert ask(server, requests=2) == ["cat"]
    assert len(server.pauses) == 2
