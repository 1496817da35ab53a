"""The path prefix under which a proxy shows the service, whether or not the proxy removes it."""

import logging
from collections.abc import Iterable
from typing import Final

from starlette.types import Scope

from service.server import TRUSTED_PROXY
from service.setting_values import parse_root_path

logger = logging.getLogger("vitserve")

_PREFIX_HEADER: Final = b"x-forwarded-prefix"
_MAX_CHARACTERS: Final = 1000


class Prefixes:
    """Removes the prefix from the path of each request, so that a route has only one path.

    The prefix comes from `X-Forwarded-Prefix` if a trusted proxy sends it, else it is `root_path`.
    A path may lack the prefix, because the proxy removes it or the caller bypasses the proxy.

    Args:
        root_path: the configured prefix; may be empty.
        routes: paths of all routes; a prefix with the first segment of one is never removed.
    """

    def __init__(self, root_path: str, routes: Iterable[str]) -> None:
        self.root_path = root_path
        self._first_segments = frozenset(_first_segment(path) for path in routes)
        if root_path and _first_segment(root_path) in self._first_segments:
            logger.warning(
                "VIT_ROOT_PATH=%s begins like a route: only a proxy can remove it", root_path
            )

    def take_off(self, scope: Scope) -> str | None:
        """Remove the prefix from a request's path, and return the prefix for links.

        The path becomes empty if it is the prefix alone. Return None if a trusted proxy sends an
        invalid prefix.
        """
        server_prefix = scope.get("root_path", "")
        scope["root_path"] = ""  # otherwise Starlette would expect it in the path
        prefix: str | None = self.root_path or server_prefix
        if scope.get(TRUSTED_PROXY):
            values = [
                value.decode("latin-1")
                for name, value in scope["headers"]
                if name == _PREFIX_HEADER
            ]
            if values:
                prefix = _joined(values)
        for candidate in (prefix, self.root_path, server_prefix):
            if candidate and self._has(scope["path"], candidate):
                scope["path"] = scope["path"].removeprefix(candidate)
                break
        return prefix

    def _has(self, path: str, prefix: str) -> bool:
        if _first_segment(prefix) in self._first_segments:
            return False
        return f"{path}/".startswith(f"{prefix}/")


def _first_segment(path: str) -> str:
    return path.split("/")[1]


def _joined(values: Iterable[str]) -> str | None:
    """Return the prefix of a chain of proxies, the outermost first, None if it is invalid."""
    joined = ",".join(values)
    if len(joined) > _MAX_CHARACTERS:
        return None
    try:
        return "".join(parse_root_path(part.strip()) for part in joined.split(","))
    except ValueError:
        return None
