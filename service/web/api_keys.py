"""API keys: which requests need a key, and how many requests each key has in flight."""

import hmac
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import TooManyRequests, Unauthorized
from service.observe.metrics import Metrics
from service.setting_values import ApiKey
from service.settings import Settings
from service.web.middleware import request_context
from service.web.path_rules import PathRules


def holds_admin_key(authorization: str, settings: Settings) -> bool:
    """Return whether an `Authorization` header has the admin key, compared in constant time."""
    if settings.admin_key is None:
        return False
    token = bearer_token(authorization) or b""
    return hmac.compare_digest(token, settings.admin_key.get_secret_value().encode())


class KeyGuard:
    """Identifies the key of a request, and counts the requests in flight of each key.

    Belongs to one event loop.

    Args:
        keys: all known keys; empty if requests need none.
        max_requests: limit on the requests in flight of one key; 0: unlimited.
        metrics: where requests in flight are counted.
    """

    def __init__(self, keys: Collection[ApiKey], max_requests: int, metrics: Metrics) -> None:
        self._keys = keys
        self._max_requests = max_requests
        self._metrics = metrics
        self._in_flight: Counter[ApiKey] = Counter()

    def find(self, authorization: str) -> ApiKey | None:
        """Return the key in an `Authorization` header, or raise `Unauthorized`.

        Without known keys, return None.
        """
        if not self._keys:
            return None
        token = bearer_token(authorization)
        # Compare every key in constant time: timing must not reveal which one matched, or how far.
        matching = [key for key in self._keys if hmac.compare_digest(token or b"", key.secret)]
        if not token:
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
        if not matching:
            name, _, secret = token.partition(b":")
            with_name = [
                key
                for key in self._keys
                if key.name.encode() == name and hmac.compare_digest(secret, key.secret)
            ]
            remedy = ": send it without its name and the colon" if with_name else ""
            raise Unauthorized(f"unknown API key{remedy}")
        return matching[0]

    @contextmanager
    def request(self, key: ApiKey | None) -> Iterator[None]:
        """Count one request of a key while it is handled; raises `TooManyRequests`."""
        if key is None:
            yield
            return
        if self._max_requests and self._in_flight[key] >= self._max_requests:
            raise TooManyRequests(
                f"this key already has {self._max_requests} requests in flight, which is its limit"
            )
        self._in_flight[key] += 1
        try:
            with self._metrics.key_inflight.labels(key.name).track_inprogress():
                yield
        finally:
            self._in_flight[key] -= 1


class ApiKeyMiddleware:
    """Requires `Authorization: Bearer KEY` on every route, except public and admin routes."""

    def __init__(self, app: ASGIApp, guard: KeyGuard, rules: PathRules, settings: Settings) -> None:
        self._app = app
        self._guard = guard
        self._rules = rules
        self._public = rules.public | {""}  # the empty path redirects to the page
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; raises `Unauthorized` or `TooManyRequests`."""
        key = self._key_of(scope) if self._needs_key(scope) else None
        if key is not None:
            context = request_context(scope)
            context.key_name = key.name
            context.key_owner = key.owner
            if scope["path"] in self._rules.probes:
                key = None  # probes are not counted
        with self._guard.request(key):
            await self._app(scope, receive, send)

    def _needs_key(self, scope: Scope) -> bool:
        if scope["type"] != "http" or scope["path"] in self._public:
            return False
        return not self._rules.needs_admin_key(scope["method"], scope["path"])

    def _key_of(self, scope: Scope) -> ApiKey | None:
        """Return the key of a request; None if it has the admin key where that is accepted."""
        authorization = Headers(scope=scope).get("authorization", "")
        is_admin = holds_admin_key(authorization, self._settings)
        if is_admin and self._rules.accepts_admin_key(scope["path"]):
            return None
        try:
            return self._guard.find(authorization)
        except Unauthorized:
            if not is_admin:
                raise
        raise Unauthorized("this is the admin key, and an API key is needed here")


def bearer_token(authorization: str) -> bytes | None:
    """Return the token of an `Authorization: Bearer` header (latin-1) as sent, or None."""
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer":
        return None
    return token.strip().encode("latin-1", "backslashreplace")
