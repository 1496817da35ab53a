from __future__ import annotations

import json

import pytest

from model import errors as model_errors
from service import errors
from service.web.problems import TABLE, body, problem_of

CONTRACT = {
    (400, "malformed_request"),
    (401, "unauthorized"),
    (403, "forbidden"),
    (404, "not_found"),
    (405, "method_not_allowed"),
    (408, "request_timeout"),
    (409, "swap_under_way"),
    (413, "upload_too_large"),
    (404, "unknown_model"),
    (409, "default_model"),
    (409, "head_full"),
    (409, "head_without_backbone"),
    (409, "head_without_examples"),
    (409, "name_taken"),
    (413, "image_too_large"),
    (413, "too_many_images"),
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
    (503, "heads_unavailable"),
    (503, "draining"),
    (504, "deadline_exceeded"),
}

NEVER_ANSWERED = {errors.SettingsError, errors.ClientDisconnected}
"""Start-up only, and a caller that is gone."""

ONLY_PARENTS = {errors.ServiceError, errors.Unavailable, model_errors.ImageError}


def subclasses(kind: type[Exception]) -> set[type[Exception]]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


def test_the_table_holds_exactly_the_statuses_and_codes_that_clients_rely_on() -> None:
    assert set(TABLE.values()) == CONTRACT


def test_every_error_that_a_request_can_meet_has_its_row() -> None:
    reachable = subclasses(errors.ServiceError) | subclasses(model_errors.ImageError) | {model_errors.InputError}
    reachable -= ONLY_PARENTS | NEVER_ANSWERED
    # Classes that tests of other files made up do not count.
    reachable = {kind for kind in reachable if kind.__module__ in ("service.errors", "model.errors")}
    assert reachable == set(TABLE)


def test_what_is_not_in_the_table_says_nothing_of_itself() -> None:
    problem = problem_of(KeyError("secret"))
    assert problem.status == 500
    assert "secret" not in problem.detail
    assert problem.headers == {}


@pytest.mark.parametrize("kind", [errors.QueueFull, errors.ReceivingFull, errors.EngineUnavailable, errors.Draining])
def test_every_503_says_when_to_try_again(kind: type[Exception]) -> None:
    assert int(problem_of(kind("later")).headers["Retry-After"]) >= 1


@pytest.mark.parametrize(("length", "kept"), [(499, 499), (500, 500), (501, 499), (100_000, 499)])
def test_a_detail_has_at_most_500_characters_and_keeps_both_ends(length: int, kept: int) -> None:
    detail = problem_of(errors.NotFound("a" * (length - 3) + "end")).detail
    assert len(detail) == kept
    assert detail.endswith("end")
    assert ("..." in detail) == (length > 500)


def test_the_document_is_rfc_9457_with_code_and_request_id() -> None:
    document = json.loads(body(problem_of(errors.NotFound("/ü: no such path")), "abc"))
    assert document == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": "/ü: no such path",
        "code": "not_found",
        "request_id": "abc",
    }
