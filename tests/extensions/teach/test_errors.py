"""The problems that answer errors of taught heads are part of the contract with callers."""

from service.extensions.teach import errors
from service.web.problems import codes, problem_of
from tests.service.web.apps import app

CONTRACT = {
    errors.HeadFull: (409, "head_full"),
    errors.HeadWithoutBackbone: (409, "head_without_backbone"),
    errors.HeadWithoutExamples: (409, "head_without_examples"),
    errors.HeadsUnavailable: (503, "heads_unavailable"),
}


def test_errors_of_heads_keep_their_codes() -> None:
    problems = {kind: problem_of(kind("why")) for kind in CONTRACT}
    assert {kind: (found.status, found.code) for kind, found in problems.items()} == CONTRACT
    assert problems[errors.HeadsUnavailable].headers == {"Retry-After": "5"}


def test_refusals_are_counted_from_zero() -> None:
    assert {code for _, code in CONTRACT.values()} <= codes()
    assert app().metric("vit_rejected_total", reason="head_full") == 0
