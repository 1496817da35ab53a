"""How middleware treats the paths of several parts of an application."""

import pytest
from starlette.responses import Response

from service.extension import Routes
from service.web.path_rules import PathRules
from service.web.problems import Problem


def teapot(problem: Problem) -> Response:
    return Response(status_code=418)


RULES = PathRules(
    [
        Routes([], public=frozenset({"/open"}), probes=frozenset({"/alive"}), admin="PUT /a/.+"),
        Routes(
            [],
            public=frozenset({"/ping"}),
            probes=frozenset({"/ping"}),
            admin=r"\w+ /b|\w+ /c",
            accepts_admin=("/heads/",),
            problem_answers={"/tea": teapot},
        ),
        Routes([]),
    ]
)


def test_paths_of_all_parts_are_joined() -> None:
    assert RULES.public == {"/open", "/ping"}
    assert RULES.probes == {"/alive", "/ping"}


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("PUT", "/a/x", True),
        ("POST", "/b", True),
        ("DELETE", "/c", True),
        ("GET", "/a/x", False),
        ("POST", "/b/x", False),
        ("POST", "/x/c", False),
    ],
)
def test_admin_pattern_matches_as_a_whole(method: str, path: str, needed: bool) -> None:
    assert RULES.needs_admin_key(method, path) is needed


@pytest.mark.parametrize(
    ("path", "accepted"),
    [("/heads", True), ("/heads/a/b", True), ("/headsets", False), ("/x/heads/", False)],
)
def test_admin_prefix_ends_at_a_slash(path: str, accepted: bool) -> None:
    assert RULES.accepts_admin_key(path) is accepted


def test_problem_form_follows_the_prefix() -> None:
    assert RULES.problem_answer("/tea/pot") is teapot
    assert RULES.problem_answer("/coffee/tea") is None


def test_routes_may_state_no_rules() -> None:
    rules = PathRules([Routes([])])
    assert not rules.needs_admin_key("PUT", "/a")
    assert not rules.accepts_admin_key("/a")
    assert rules.problem_answer("/a") is None
