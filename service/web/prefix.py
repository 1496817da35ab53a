"""The path prefix under which a proxy shows the service, whether the proxy cuts it off or not."""

from collections.abc import Iterable
from typing import Final

from starlette.types import Scope

from service.server import TRUSTED_PROXY
from service.setting_values import parse_root_path

_HEADER: Final = b"x-forwarded-prefix"


class Prefixes:
    """Takes the prefix off the path of each request, so that everything behind knows one path of a
    route.

    The prefix is that of `X-Forwarded-Prefix`, when a trusted proxy sends it, else `root_path`. A
    path without it is that of a proxy that cuts it off, or of a caller on this machine.

    Args:
        root_path: the configured prefix; empty for none.
        routes: paths of all routes; a prefix that begins as one of them is never taken off.
    """

    def __init__(self, root_path: str, routes: Iterable[str]) -> None:
        self._root_path = root_path
        self._first_segments = frozenset(_first_segment(path) for path in routes)

    def take_off(self, scope: Scope) -> str | None:
        """Take the prefix off the path of a request, and return it: what its links begin with.

        A path that is the prefix alone becomes empty. None is returned if a trusted proxy sends
        what is not a prefix.
        """
        of_server = scope.get("root_path", "")
        scope["root_path"] = ""  # else Starlette would look for it in the path
        prefix: str | None = self._root_path or of_server
        if scope.get(TRUSTED_PROXY):
            values = [
                value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER
            ]
            if values:
                prefix = _joined(values)
        for each in (prefix, self._root_path, of_server):
            if each and self._has(scope["path"], each):
                scope["path"] = scope["path"][len(each) :]
                break
        return prefix

    def _has(self, path: str, prefix: str) -> bool:
        return (
            f"{path}/".startswith(f"{prefix}/")
            and _first_segment(prefix) not in self._first_segments
        )


def _first_segment(path: str) -> str:
    return path.split("/")[1]


def _joined(values: Iterable[str]) -> str | None:
    """Return the prefix of a chain of proxies, the outermost first, None if it is not one."""
    try:
        return "".join(
            parse_root_path(part.strip()) for value in values for part in value.split(",")
        )
    except ValueError:
        return None
