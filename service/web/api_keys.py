"""API keys: which requests need a key, and how many requests each key has in flight."""

import hmac
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import TooManyRequests, Unauthorized
from service.observe.metrics import Metrics
from service.setting_values import ApiKey
from service.settings import Settings
from service.web.middleware import PROBES, request_context

_ADMIN: Final = re.compile(r"(?:PUT|DELETE) /models/.+|\w+ /v2/repository/models/.+/(?:un)?load")
_HEADS: Final = "/heads/"


def needs_admin_key(method: str, path: str) -> bool:
    """Return whether a route takes the admin key, and so no other; it asks for that itself."""
    return _ADMIN.fullmatch(f"{method} {path}") is not None


def holds_admin_key(authorization: str, settings: Settings) -> bool:
    """Return whether an `Authorization` header has the admin key; it is compared in constant time."""
    expected, given = settings.admin_key, bearer_token(authorization) or b""
    return expected is not None and hmac.compare_digest(given, expected.get_secret_value().encode())


class KeyGuard:
    """Identifies the key of a request, and counts the requests in flight of each key; belongs to
    one event loop.

    Args:
        most: requests in flight that each key may have; 0 is no limit.
    """

    def __init__(self, keys: Collection[ApiKey], most: int, metrics: Metrics) -> None:
        self._keys = keys
        self._most = most
        self._metrics = metrics
        self._in_flight: Counter[ApiKey] = Counter()

    def find(self, authorization: str) -> ApiKey | None:
        """Return the key in an `Authorization` header, None without keys; raises `Unauthorized`."""
        if not self._keys:
            return None
        offered = bearer_token(authorization)
        # Every key is compared, each in constant time, so that timing tells neither which nor how
        # much matched.
        matching = [key for key in self._keys if hmac.compare_digest(offered or b"", key.secret)]
        if not offered:
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
        if not matching:
            raise Unauthorized("the API key is wrong: it is none of the service's")
        return matching[0]

    @contextmanager
    def request(self, key: ApiKey | None) -> Iterator[None]:
        """Count one request of a key while it is handled; raises `TooManyRequests` if it has as
        many as it may.
        """
        if key is None:
            yield
            return
        if self._most and self._in_flight[key] >= self._most:
            raise TooManyRequests(
                f"this key has {self._most} requests in flight already, and may have no more"
            )
        self._in_flight[key] += 1
        try:
            with self._metrics.key_inflight.labels(key.name).track_inprogress():
                yield
        finally:
            self._in_flight[key] -= 1


class ApiKeyMiddleware:
    """Requires `Authorization: Bearer KEY` on every route, except public ones and those that take
    the admin key.

    The paths of taught heads take either.
    """

    def __init__(
        self, app: ASGIApp, guard: KeyGuard, public: Iterable[str], settings: Settings
    ) -> None:
        self._app = app
        self._guard = guard
        self._public = frozenset(public) | {""}  # which leads to the page
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; raises `Unauthorized` or `TooManyRequests`."""
        counted = None
        is_http = scope["type"] == "http"
        if is_http and not (
            scope["path"] in self._public or needs_admin_key(scope["method"], scope["path"])
        ):
            authorization = Headers(scope=scope).get("authorization", "")
            is_admin = f"{scope['path']}/".startswith(_HEADS) and holds_admin_key(
                authorization, self._settings
            )
            key = None if is_admin else self._guard.find(authorization)
            if key is not None:
                context = request_context(scope)
                context.key_name, context.key_owner = key.name, key.owner
                counted = None if scope["path"] in PROBES else key
        with self._guard.request(counted):
            await self._app(scope, receive, send)


def bearer_token(authorization: str) -> bytes | None:
    """Return the token of an `Authorization: Bearer` header (latin-1) as the bytes that were sent,
    or None.
    """
    scheme, _, given = authorization.partition(" ")
    return (
        given.strip().encode("latin-1", "backslashreplace") if scheme.lower() == "bearer" else None
    )
