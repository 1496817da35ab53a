"""Too many clients, disconnects and endless requests cost only the client at fault."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Pictures, Raw, Serve, Served, problem
from tests.launcher import until

pytestmark = pytest.mark.timeout(180)  # servers start and end

PLACES = 4
MAX_BATCH = 3


@pytest.fixture(scope="module")
def holding(serve_module: Serve) -> Served:
    """Launch only batches of three, so that two images wait until their deadline."""
    return serve_module(
        queue_size=PLACES,
        max_batch=MAX_BATCH,
        max_delay_ms=10_000,
        request_timeout=5,
        max_upload_bytes=1_000_000,
    )


@pytest.fixture(scope="module")
def narrow(serve_module: Serve) -> Served:
    """A service of one slot, held by an image that waits for a full batch."""
    return serve_module(
        queue_size=1,
        max_batch=2,
        max_delay_ms=10_000,
        request_timeout=60,
        max_upload_bytes=1_000_000,
    )


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"holding", "narrow"} & {*request.fixturenames}:
        until(request.getfixturevalue(name).idle)


@contextmanager
def waiting(server: Served, picture: bytes, count: int) -> Iterator[list[Raw]]:
    """Run `count` clients whose images wait for a full batch, each holding a slot."""
    until(server.idle)
    with ExitStack() as stack:
        callers = [stack.enter_context(server.raw()) for _ in range(count)]
        for caller in callers:
            caller.post(picture)
        until(lambda: server.metric("vit_queue_depth") == count)
        yield callers


def test_admitted_requests_survive_refusals(holding: Served, pictures: Pictures) -> None:
    files = [("file", ("a.png", picture)) for picture in pictures.files[:MAX_BATCH]]
    refused = holding.metric("vit_rejected_total", reason="queue_full")
    with waiting(holding, pictures.files[0], MAX_BATCH - 1) as callers:
        assert problem(holding.client.post("/classify/batch", files=files)) == (503, "queue_full")
        assert holding.classify(pictures.files[1]).status_code == 200
        for caller in callers:
            status, _, body = caller.answer()
            assert status == 200
            document = json.loads(body)
            pictures.check(0, document)
            assert document["batch_size"] == MAX_BATCH
    assert holding.metric("vit_rejected_total", reason="queue_full") == refused + 1


def test_each_timeout_has_its_own_status(holding: Served, pictures: Pictures) -> None:
    launched = holding.metric("vit_batch_size_sum")
    until(holding.idle)
    with holding.raw() as caller:
        caller.post(pictures.files[0], sent=20)
        until(lambda: holding.metric("vit_inflight_requests") == 1)
        assert problem(holding.classify(pictures.files[1])) == (504, "deadline_exceeded")
        assert caller.problem() == (408, "request_timeout")
    assert holding.metric("vit_batch_size_sum") == launched


LARGE = 30 << 20


def chunks() -> Iterator[bytes]:
    for _ in range(LARGE >> 16):
        yield bytes(1 << 16)


RAW = {"Content-Type": "image/png"}
BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "content-length": lambda: {"content": bytes(LARGE), "headers": RAW},
    "chunked": lambda: {"content": chunks(), "headers": RAW},
    "multipart": lambda: {"files": [("file", ("large.png", bytes(LARGE)))]},
}


@pytest.mark.parametrize("body", BODIES)
def test_a_refusal_reaches_a_sending_caller(body: str, narrow: Served, pictures: Pictures) -> None:
    def send() -> httpx.Response:
        return narrow.client.post("/classify", **BODIES[body]())

    too_large = send()
    assert problem(too_large) == (413, "upload_too_large")
    assert too_large.headers["connection"] == "close"
    with waiting(narrow, pictures.files[0], 1):
        full = send()
    assert problem(full) == (503, "queue_full")
    assert full.headers["connection"] == "close"


def test_a_refusal_reaches_a_late_reader(holding: Served) -> None:
    with holding.raw() as caller:
        caller.post(bytes(LARGE))
        assert caller.problem() == (413, "upload_too_large")
