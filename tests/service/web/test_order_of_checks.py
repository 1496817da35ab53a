"""Checks of a request run in one order, and the first failing check gives the answer.

The order is: key, path and method, query, slots, sizes, form of the body, kind of file, image. Each
fault below spoils a request in one way. For each pair of faults of neighbouring checks, the earlier
check must answer.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from model import errors as model_errors
from service import errors
from service.web.problems import TABLE, problem_of
from tests.service.fakes import png
from tests.service.web.apps import App, app, service_in

KEY = "s3cret"
BOUNDARY = "b0undary"


@dataclass
class Draft:
    """A valid request, until faults are added."""

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
        head = (
            f"--{BOUNDARY}\r\nContent-Disposition: form-data; "
            f'name="{self.part_name}"; filename="a"\r\n\r\n'
        )
        return (
            head.encode()
            + self.picture
            + (f"\r\n--{BOUNDARY}--\r\n".encode() if self.complete else b"")
        )


Fault = tuple[str, str, dict[str, Any]]
"""A fault: the failing check, the code of its answer, and the changed fields of a draft."""

FAULTS: list[Fault] = [
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
    ("form", "malformed_request", {"part_name": "image"}),
    ("kind", "unsupported_media_type", {"picture": b"no picture at all"}),
    ("image", "invalid_image", {"picture": png(7)[:40]}),
    ("image", "invalid_image", {"picture": b""}),
]


CHECKS = list(dict.fromkeys(check for check, _, _ in FAULTS))


def neighbours() -> Iterator[tuple[Fault, Fault]]:
    """Yield pairs of faults of neighbouring checks that one request can have."""
    for first, second in itertools.combinations(FAULTS, 2):
        is_next = CHECKS.index(second[0]) == CHECKS.index(first[0]) + 1
        if is_next and not first[2].keys() & second[2].keys():
            yield first, second


PAIRS = list(neighbours())


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
            draft.method,
            draft.path,
            query=draft.query,
            headers=headers,
            body=None if chunked else body,
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


def test_a_request_without_faults_is_fine(service: App) -> None:
    assert code_of(service, Draft()) == ""
    assert code_of(service, Draft(), chunked=True) == ""


@pytest.mark.parametrize(
    ("_", "code", "fault"), FAULTS, ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_each_fault_is_answered_by_code(
    _: str, code: str, fault: dict[str, Any], service: App
) -> None:
    assert code_of(service, Draft(**fault)) == code
    if "declared" not in fault:
        assert code_of(service, Draft(**fault), chunked=True) == code


@pytest.mark.parametrize(
    ("first", "second"), PAIRS, ids=[f"{a[0]}:{a[1]} before {b[0]}:{b[1]}" for a, b in PAIRS]
)
def test_the_earlier_of_two_checks_answers(first: Fault, second: Fault, service: App) -> None:
    draft = Draft(**(first[2] | second[2]))
    assert code_of(service, draft) == first[1]
    if draft.declared is None:
        assert code_of(service, draft, chunked=True) == first[1]


CONTRACT = {
    (400, "malformed_request"),
    (401, "unauthorized"),
    (403, "forbidden"),
    (404, "not_found"),
    (405, "method_not_allowed"),
    (406, "not_acceptable"),
    (408, "request_timeout"),
    (412, "precondition_failed"),
    (417, "expectation_failed"),
    (409, "swap_under_way"),
    (413, "upload_too_large"),
    (404, "unknown_model"),
    (409, "default_model"),
    (409, "name_taken"),
    (413, "image_too_large"),
    (413, "too_many_images"),
    (421, "unknown_host"),
    (422, "image_too_costly"),
    (415, "unsupported_media_type"),
    (422, "invalid_image"),
    (422, "invalid_parameter"),
    (422, "checkpoint_refused"),
    (429, "too_many_requests"),
    (500, "inference_failed"),
    (503, "queue_full"),
    (503, "receiving_full"),
    (503, "engine_unavailable"),
    (503, "model_loading"),
    (503, "models_full"),
    (503, "model_failed"),
    (503, "draining"),
    (504, "deadline_exceeded"),
}

NEVER_ANSWERED = {errors.SettingsError, errors.ClientDisconnected}
"""Errors that no request gets: at the start, or after a disconnect."""

ONLY_PARENTS = {errors.ServiceError, errors.Unavailable, model_errors.ImageError}


def subclasses(kind: type[Exception]) -> set[type[Exception]]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


def test_statuses_with_codes_stay_the_same() -> None:
    assert set(TABLE.values()) == CONTRACT


def test_each_error_has_a_row_in_the_table() -> None:
    reachable = (
        subclasses(errors.ServiceError)
        | subclasses(model_errors.ImageError)
        | {model_errors.InputError}
    )
    reachable -= ONLY_PARENTS | NEVER_ANSWERED
    # Classes that other tests define do not count.
    reachable = {
        kind for kind in reachable if kind.__module__ in ("service.errors", "model.errors")
    }
    assert reachable == set(TABLE)


def test_unknown_errors_reveal_nothing() -> None:
    problem = problem_of(KeyError("secret"))
    assert problem.status == 500
    assert "secret" not in problem.detail
    assert problem.headers == {}


@pytest.mark.parametrize(
    "kind", [errors.QueueFull, errors.ReceivingFull, errors.EngineUnavailable, errors.Draining]
)
def test_503_says_when_to_try_again(kind: type[Exception]) -> None:
    assert int(problem_of(kind("later")).headers["Retry-After"]) >= 1


@pytest.mark.parametrize(("length", "kept"), [(499, 499), (500, 500), (501, 499), (100_000, 499)])
def test_long_details_are_cut_in_the_middle(length: int, kept: int) -> None:
    detail = problem_of(errors.NotFound("a" * (length - 3) + "end")).detail
    assert len(detail) == kept
    assert detail.endswith("end")
    assert ("..." in detail) == (length > 500)


def test_a_problem_document_has_these_fields() -> None:
    answer = problem_of(errors.NotFound("/ü: no such path")).answer("abc")
    document = json.loads(bytes(answer.body))
    assert document == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": "/ü: no such path",
        "code": "not_found",
        "request_id": "abc",
    }
