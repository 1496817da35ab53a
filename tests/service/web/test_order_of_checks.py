"""The first failing check wins: key, path and method, query, room, sizes, form of the body, kind, image.

Each fault below spoils a request in one way; every pair of faults must be answered as the earlier one is.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.service.fakes import png
from tests.service.web.apps import App, app, service_in

KEY = "s3cret"
BOUNDARY = "b0undary"


@dataclass
class Draft:
    """A request that is fine until faults are put into it."""

    method: str = "POST"
    path: str = "/classify"
    query: str = "top_k=3"
    key: str = KEY
    part_name: str = "file"
    picture: bytes = field(default_factory=lambda: png(7))
    content_type: str = f"multipart/form-data; boundary={BOUNDARY}"
    complete: bool = True
    declared: int | None = None
    full: bool = False
    draining: bool = False

    def body(self) -> bytes:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{self.part_name}"; filename="a"\r\n\r\n'
        return head.encode() + self.picture + (f"\r\n--{BOUNDARY}--\r\n".encode() if self.complete else b"")


FAULTS: list[tuple[str, str, dict[str, Any]]] = [
    ("key", "unauthorized", {"key": "wrong"}),
    ("path", "not_found", {"path": "/classified"}),
    ("path", "method_not_allowed", {"method": "PUT"}),
    ("query", "invalid_parameter", {"query": "top_k=0"}),
    ("query", "invalid_parameter", {"query": "top_k=11"}),
    ("query", "invalid_parameter", {"query": "attention=perhaps"}),
    ("room", "queue_full", {"full": True}),
    ("room", "draining", {"draining": True}),
    ("sizes", "upload_too_large", {"declared": 1 << 40}),
    ("sizes", "upload_too_large", {"picture": png(7) + bytes(70_000)}),
    ("form", "malformed_request", {"complete": False}),
    ("form", "malformed_request", {"content_type": "multipart/form-data"}),
    ("form", "unsupported_media_type", {"content_type": "application/json"}),
    ("form", "invalid_image", {"part_name": "image"}),
    ("kind", "unsupported_media_type", {"picture": b"no picture at all"}),
    ("image", "invalid_image", {"picture": png(7)[:40]}),
    ("image", "invalid_image", {"picture": b""}),
]


def compatible(a: tuple[str, str, dict[str, Any]], b: tuple[str, str, dict[str, Any]]) -> bool:
    return a[0] != b[0] and not a[2].keys() & b[2].keys()


PAIRS = [pair for pair in itertools.combinations(FAULTS, 2) if compatible(*pair)]


@pytest.fixture(scope="module")
def service() -> App:
    return app(api_keys=KEY, queue_size=1, max_request_bytes=60_000, max_upload_bytes=50_000)


def code_of(service: App, draft: Draft, *, chunked: bool = False) -> str:
    async def ask() -> str:
        headers = {"authorization": f"Bearer {draft.key}", "content-type": draft.content_type}
        body = draft.body()
        if not chunked:
            headers["content-length"] = str(draft.declared or len(body))
        communicator = service.communicator(
            draft.method, draft.path, query=draft.query, headers=headers, body=None if chunked else body
        )
        if chunked:
            for start in range(0, len(body), 1000):
                communicator.feed(body[start : start + 1000])
            communicator.feed(b"", more=False)
        await communicator.run()
        return "" if communicator.status == 200 else communicator.code

    service.lifecycle.draining = draft.draining
    with ExitStack() as stack:
        if draft.full:
            stack.enter_context(service_in(service).limiter.permit())
        code = asyncio.run(ask())
    service.lifecycle.draining = False
    assert service_in(service).limiter.in_use == 0
    return code


def test_the_request_without_a_fault_is_fine(service: App) -> None:
    assert code_of(service, Draft()) == ""
    assert code_of(service, Draft(), chunked=True) == ""


@pytest.mark.parametrize(("_", "code", "fault"), FAULTS, ids=lambda value: str(value) if isinstance(value, str) else "")
def test_each_fault_has_its_code(_: str, code: str, fault: dict[str, Any], service: App) -> None:
    assert code_of(service, Draft(**fault)) == code
    if "declared" not in fault:
        assert code_of(service, Draft(**fault), chunked=True) == code


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[f"{a[0]}:{a[1]} before {b[0]}:{b[1]}" for a, b in PAIRS])
def test_of_two_faults_the_earlier_check_answers(
    first: tuple[str, str, dict[str, Any]], second: tuple[str, str, dict[str, Any]], service: App
) -> None:
    draft = Draft(**(first[2] | second[2]))
    assert code_of(service, draft) == first[1]
    if draft.declared is None:
        assert code_of(service, draft, chunked=True) == first[1]
