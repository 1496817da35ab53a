"""Which web pages may call the service from a browser: by the host that they call, and by their
origin.
"""

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

_UNCHANGING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def split_origins(origins: Iterable[str]) -> tuple[list[str], str | None]:
    """Return the origins to compare, and a pattern of those with `*.` before their host, None
    without such an origin.

    The subdomains of an origin are names of letters, digits, hyphens and dots, and not the domain
    itself.
    """
    exact = [origin for origin in origins if "*." not in origin]
    patterns = [
        re.escape(origin).replace(r"\*\.", r"(?:[a-z0-9_-]+\.)+")
        for origin in origins
        if "*." in origin
    ]
    return exact, "|".join(patterns) or None


class OriginMiddleware:
    """Refuses what a web page does to a service that its reader can reach, and the page's author
    cannot.

    `Host` must be an allowed name: a page whose own name was made to lead here (DNS rebinding)
    calls by that name. Methods that change something are refused to pages of another origin:
    browsers send simple requests without asking. A page of a sibling domain or of another port
    (`same-site`) is another origin too.
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
            is_tcp = server is None or server[1] is not None  # no browser calls a Unix socket
            if is_tcp and not is_served_host(host, self._hosts):
                raise UnknownHost(
                    f"{host!r} is not a host of this service; the operator can add it to VIT_ALLOWED_HOSTS"
                )
            if scope["method"] not in _UNCHANGING:
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
    """Return the name and the port of a host in small letters, None if it is not one."""
    try:
        split = urlsplit(f"//{host}")
        name, port = split.hostname, split.port
    except ValueError:
        return None
    if name is None or split.netloc != host or "@" in host:
        return None
    return name.removesuffix("."), port


def is_served_host(host: str, served: Collection[str]) -> bool:
    """Return whether a `Host` header has one of the served names; `*` is any name, `*.` before a
    name any subdomain.

    An IP address is served always, because no other site can lead it here; so is a request without
    `Host`, which no browser sends.
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
        parents = (f"*{name[dot:]}" for dot, character in enumerate(name) if character == ".")
        return name in served or any(parent in served for parent in parents)
    return True


def _is_origin_of(origin: str, host: str) -> bool:
    """Return whether a page of this origin calls its own host; a proxy may have left out the port."""
    scheme, _, authority = origin.partition("://")
    page = _split_host(authority)
    called = _split_host(host)
    if page is None or called is None or page[0] != called[0]:
        return False
    default = _DEFAULT_PORTS.get(scheme)
    return called[1] is None or called[1] == (page[1] or default)
