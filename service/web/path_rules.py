"""How middleware treats paths, by the rules of the core and of the extensions."""

import re
from collections.abc import Callable, Sequence

from starlette.responses import Response

from service.extension import Routes
from service.web.problems import Problem


class PathRules:
    """The rules of all routes of an application; see `service.extension.Routes`.

    Attributes:
        public: paths that need no API key.
        probes: paths that machines poll.
    """

    def __init__(self, parts: Sequence[Routes]) -> None:
        self.public = frozenset[str]().union(*(part.public for part in parts))
        self.probes = frozenset[str]().union(*(part.probes for part in parts))
        self._admin = re.compile("|".join(f"(?:{part.admin})" for part in parts if part.admin))
        self._accepts_admin = tuple(prefix for part in parts for prefix in part.accepts_admin)
        self._problem_answers = tuple(
            answer for part in parts for answer in part.problem_answers.items()
        )

    def needs_admin_key(self, method: str, path: str) -> bool:
        """Return whether a route requires the admin key, which the route itself checks."""
        return self._admin.fullmatch(f"{method} {path}") is not None

    def accepts_admin_key(self, path: str) -> bool:
        """Return whether a path takes the admin key as well as an API key."""
        return f"{path}/".startswith(self._accepts_admin)

    def problem_answer(self, path: str) -> Callable[[Problem], Response] | None:
        """Return the function that answers errors on this path; None for a problem document."""
        for prefix, answer in self._problem_answers:
            if path.startswith(prefix):
                return answer
        return None
