"""When a client repeats a request, on a clock that only pauses move; and streams of images."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.fakes import PATIENCE, on_a_loop
from tests.vitserve.answers import CAT, FULL, URL
from vitserve.client import AsyncClient, Client, ClientError, ImageRefused, Retries
from vitserve.documents import Classification
from vitserve.errors import ModelFailed

Step = int | Exception | tuple[int, str]
"""A status, a status with Retry-After, or an error instead of an answer."""


class Scripted:
    """A server that answers with one step after another, and the clock that pauses move."""

    def __init__(self, *steps: Step, took: float = 0.0) -> None:
        self.steps = list(steps)
        self.took = took
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.now += self.took
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        status, headers = (
            (step, {}) if isinstance(step, int) else (step[0], {"Retry-After": step[1]})
        )
        answer = (
            {"model": "tiny", "labels": ["cat"]} if status == 200 else FULL | {"status": status}
        )
        return httpx.Response(status, json=answer, headers=headers)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)


def labels_blocking(server: Scripted, requests: int = 1, **retries: Any) -> list[str]:
    policy = Retries(clock=lambda: server.now, **{"jitter": lambda: 0.0, **retries})
    with Client(
        URL, transport=httpx.MockTransport(server), retries=policy, sleep=server.sleep
    ) as client:
        for _ in range(requests):
            found = client.labels()
    return found


def labels_asynchronous(server: Scripted, requests: int = 1, **retries: Any) -> list[str]:
    async def ask() -> list[str]:
        policy = Retries(clock=lambda: server.now, **{"jitter": lambda: 0.0, **retries})
        transport = httpx.MockTransport(server)
        async with AsyncClient(
            URL, transport=transport, retries=policy, sleep=server.asleep
        ) as client:
            for _ in range(requests):
                found = await client.labels()
        return found

    return asyncio.run(ask())


Ask = Callable[..., list[str]]


@pytest.fixture(params=[labels_blocking, labels_asynchronous], ids=["Client", "AsyncClient"])
def ask(request: pytest.FixtureRequest) -> Ask:
    function: Ask = request.param
    return function


DOUBLED = [0.25, 0.5, 1, 2, 4, 8, 8, 8]
BROKEN = (
    httpx.ReadError("reset"),
    httpx.WriteError("broken pipe"),
    httpx.RemoteProtocolError("disconnected"),
)


@pytest.mark.parametrize(
    ("steps", "options", "pauses"),
    [
        *(([(status, "7"), (status, "0")], {}, [7, 0]) for status in (429, 503)),
        ([(503, "7"), (503, "7"), 503], {"jitter": lambda: 0.5}, [7 + 0.125, 7 + 0.25, 0.75]),
        ([503] * 8, {"tries": 9, "jitter": lambda: 1.0}, DOUBLED),
        *(([error], {}, [0.125]) for error in BROKEN),
    ],
    ids=[
        "429",
        "503",
        "jitter spreads callers",
        "without Retry-After it doubles up to 8 s",
    ]
    + [type(error).__name__ for error in BROKEN],
)
def test_pauses_respect_retry_after(
    ask: Ask, steps: list[Step], options: dict[str, Any], pauses: list[float]
) -> None:
    server = Scripted(*steps, 200)
    assert ask(server, **options) == ["cat"]
    assert server.pauses == pauses


FINAL: list[Step] = [
    *((status, "1") for status in (400, 401, 404, 408, 413, 415, 422, 500, 504)),
    *(
        httpx.ReadTimeout("silence"),
        httpx.UnsupportedProtocol("no scheme"),
        httpx.ConnectError("refused"),
    ),
]


@pytest.mark.parametrize(
    ("server", "seconds", "pauses"),
    [
        (lambda: Scripted(*[503] * 5), 60, [0.125, 0.25, 0.5, 1]),
        (lambda: Scripted((503, "20"), (503, "20"), took=6), 50, [20]),
        *((partial(Scripted, answer), 60, []) for answer in FINAL),
    ],
    ids=["tries are bounded", "a pause that would last too long"]
    + [str(answer[0]) if isinstance(answer, tuple) else type(answer).__name__ for answer in FINAL],
)
def test_client_gives_up(
    ask: Ask, server: Callable[[], Scripted], seconds: float, pauses: list[float]
) -> None:
    asked = server()
    with pytest.raises(ClientError):
        ask(asked, seconds=seconds)
    assert (asked.pauses, asked.steps, asked.now <= seconds) == (pauses, [], True)


def test_failed_model_is_not_asked_again() -> None:
    problem = FULL | {"code": "model_failed", "detail": "dogs: it cannot be read"}
    transport = httpx.MockTransport(lambda _: httpx.Response(503, json=problem))
    pauses: list[float] = []
    with (
        Client(URL, transport=transport, sleep=pauses.append) as client,
        pytest.raises(ModelFailed) as failed,
    ):
        client.labels()
    assert pauses == []
    assert "dogs: it cannot be read" in str(failed.value)


def test_client_waits_for_a_restart(ask: Ask) -> None:
    server = Scripted(200, httpx.ConnectError("refused"), httpx.ConnectError("refused"), 200)
    assert ask(server, requests=2) == ["cat"]
    assert len(server.pauses) == 2


def answer(request: httpx.Request) -> httpx.Response:
    """Return a cat for all pictures except those whose name begins with `bad`."""
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
def test_stream_keeps_the_order_of_files(tmp_path: Path, concurrency: int) -> None:
    files = write(tmp_path)
    with blocking(answer) as client:
        check(list(client.stream(files, client.classify, concurrency=concurrency)), files)


@pytest.mark.parametrize("concurrency", [1, 2, 8])
@on_a_loop
async def test_async_streams_keep_the_file_order(tmp_path: Path, concurrency: int) -> None:
    files = write(tmp_path)
    async with asynchronous(answer) as client:
        check(
            [item async for item in client.stream(files, client.classify, concurrency=concurrency)],
            files,
        )


class Source:
    """Yield images, and count those that were taken."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0

    def __iter__(self) -> Iterator[bytes]:
        for index in range(self.count):
            self.taken += 1
            yield str(index).encode()


def test_stream_sends_concurrent_requests() -> None:
    together = threading.Barrier(3)

    def handle(request: httpx.Request) -> httpx.Response:
        together.wait(PATIENCE)  # passes only while three requests wait here at once
        return answer(request)

    with blocking(handle) as client:
        assert len(list(client.stream(Source(9), client.classify, concurrency=3))) == 9


def test_stream_takes_images_on_demand() -> None:
    source = Source(1000)
    with blocking(answer) as client:
        answers = iter(client.stream(source, client.classify, concurrency=2))
        for given in range(1, 10):
            next(answers)
            assert source.taken <= given + 3
        answers.close()  # type: ignore[attr-defined]  # it is a generator
    assert source.taken < 20


@on_a_loop
async def test_closed_stream_cancels_its_requests() -> None:
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
