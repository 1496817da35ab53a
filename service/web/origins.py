"""Which web pages may call the service from a browser, by the called host and their origin."""

import ipaddress
import re
from collections.abc import Collection, Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import Forbidden, MalformedRequest, UnknownHost
from service.server import TRUSTED_PROXY
from service.settings import Settings
from service.web.middleware import request_context

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def split_origins(origins: Iterable[str]) -> tuple[list[str], str | None]:
    """Return the origins without wildcard, and a pattern for the others, or None without them.

    `*.` before a host matches its subdomains, not the host itself.
    """
    exact: list[str] = []
    patterns: list[str] = []
    for origin in origins:
        if "*." in origin:
            patterns.append(re.escape(origin).replace(r"\*\.", r"(?:[a-z0-9_-]+\.)+"))
        else:
            exact.append(origin)
    return exact, "|".join(patterns) or None


class OriginMiddleware:
    """Refuses requests by which a web page abuses its reader's access to the service.

    `Host` must be an allowed name, because a page whose name was made to resolve to the service
    (DNS rebinding) calls by that name. Pages of another origin may not call methods that change
    something, because browsers send simple requests without a preflight. A sibling domain or
    another port (`same-site`) is another origin too.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = settings.served_hosts
        self._exact, pattern = split_origins(settings.cors_origins)
        self._pattern = None if pattern is None else re.compile(pattern)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; raises `MalformedRequest`, `UnknownHost` or `Forbidden`."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if request_context(scope).prefix is None:
                prefix = headers.getlist("x-forwarded-prefix")
                raise MalformedRequest(
                    f"X-Forwarded-Prefix {', '.join(prefix)!r:.200} is not a path such as /vit"
                )
            host = headers.get("host", "")
            server = scope.get("server")
            is_tcp = server is None or server[1] is not None  # browsers do not call Unix sockets
            if is_tcp and not is_served_host(host, self._hosts):
                raise UnknownHost(
                    f"{host!r} is not a host of this service; "
                    "the operator can add it to VIT_ALLOWED_HOSTS"
                )
            # The preflight of an allowed origin has its answer already.
            is_preflight = "access-control-request-method" in headers
            if is_preflight or scope["method"] not in _SAFE_METHODS:
                self._check_origin(headers, scope)
        await self._app(scope, receive, send)

    def _check_origin(self, headers: Headers, scope: Scope) -> None:
        origin = headers.get("origin")
        if origin is not None and self._is_allowed(origin):
            return
        site = headers.get("sec-fetch-site", "").lower()
        if site in ("same-origin", "none"):
            return
        hosts = [headers.get("host", "")]
        if scope.get(TRUSTED_PROXY):
            hosts += [host.strip() for host in headers.get("x-forwarded-host", "").split(",")]
        is_foreign = origin is not None and not any(
            _is_origin_of(origin, host) for host in hosts if host
        )
        if is_foreign or site in ("cross-site", "same-site"):
            page = "another origin" if origin is None else origin
            raise Forbidden(
                f"a web page of {page} may not do this; the operator can add it to VIT_CORS_ORIGINS"
            )

    def _is_allowed(self, origin: str) -> bool:
        if "*" in self._exact or origin in self._exact:
            return True
        return self._pattern is not None and self._pattern.fullmatch(origin) is not None


def _split_host(host: str) -> tuple[str, int | None] | None:
    """Return the lower-case name and the port of a host, None if it is invalid."""
    try:
        split = urlsplit(f"//{host}")
        name = split.hostname
        port = split.port
    except ValueError:
        return None
    if name is None or split.netloc != host or "@" in host:
        return None
    return name.removesuffix("."), port


def is_served_host(host: str, served: Collection[str]) -> bool:
    """Return whether a `Host` header has one of the served names.

    `*` matches any name, and `*.` before a name its subdomains. IP addresses are always served,
    because other sites cannot make them resolve here. Requests without `Host` are served too,
    because browsers always send it.
    """
    if not host or "*" in served:
        return True
    split = _split_host(host)
    if split is None:
        return False
    name = split[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        parents = (entry.removeprefix("*") for entry in served if entry.startswith("*."))
        return name in served or name.endswith(tuple(parents))
    return True


def _is_origin_of(origin: str, host: str) -> bool:
    """Return whether the called host is the page's own; a proxy may have removed the port."""
    scheme, _, authority = origin.partition("://")
    page = _split_host(authority)
    called = _split_host(host)
    if page is None or called is None or page[0] != called[0]:
        return False
    default = _DEFAULT_PORTS.get(scheme)
    return called[1] is None or called[1] == (page[1] or default)
