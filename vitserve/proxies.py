"""The proxy that the environment configures between a client and its service."""

import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx

from vitserve.errors import ClientError

_SCHEMES = ("http", "https", "socks5", "socks5h")
_EXPECTED = "http://, https://, socks5:// or socks5h://"

Transport = TypeVar("Transport", httpx.HTTPTransport, httpx.AsyncHTTPTransport)


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, and where it is configured.

    Attributes:
        url: address with its password, as configured.
        setting: environment variable that names the proxy.
        host: host of the service, which NO_PROXY can exempt.
    """

    url: str
    setting: str
    host: str

    def __str__(self) -> str:
        try:
            shown = str(httpx.URL(self.url).copy_with(userinfo=b"")).rstrip("/")
        except httpx.InvalidURL:
            shown = "whose address is not a URL"
        return f"the proxy {shown} ({self.setting})"

    @property
    def remedy(self) -> str:
        """Return how to reach the service without this proxy."""
        return f"to connect without it, add {self.host} to NO_PROXY"


def proxy_of(url: httpx.URL) -> Proxy | None:
    """Return the proxy that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY set for an address."""
    proxies = getproxies()
    scheme = url.scheme if url.scheme in proxies else "all"
    if scheme not in proxies or not url.host or _is_exempt(url, proxies.get("no", "")):
        return None
    address = proxies[scheme]
    if "://" not in address:
        address = f"http://{address}"
    # The variable in lower case wins. Proxies of the operating system do not have a variable.
    variables = [
        name for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper()) if os.environ.get(name)
    ]
    return Proxy(address, variables[0] if variables else "of the system's settings", url.host)


def _is_exempt(url: httpx.URL, no_proxy: str) -> bool:
    """Return whether NO_PROXY names a host, in the forms of urllib, `*.`, brackets or ranges."""
    port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    if proxy_bypass(url.host) or proxy_bypass(f"{url.host}:{port}"):
        return True
    entries = [
        item.strip().partition("://")[2] or item.strip() for item in no_proxy.lower().split(",")
    ]
    return any(_names(entry.strip("[]"), url.host) for entry in entries)


def _names(entry: str, host: str) -> bool:
    """Return whether an entry of NO_PROXY is this host, its domain as `*.`, or its range."""
    if entry in (host, "*"):
        return True
    if entry.startswith("*.") and host.endswith(entry[1:]):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # the host or the entry is a name
        return False


def transport_through(proxy: Proxy | None, build: Callable[..., Transport]) -> Transport:
    """Return a transport that connects through the proxy, or directly.

    Raises:
        ClientError: the proxy cannot be used.
    """
    if proxy is None:
        return build()
    try:
        scheme = httpx.URL(proxy.url).scheme
        if scheme in _SCHEMES:
            return build(proxy=proxy.url)
        problem = f"{proxy}: expected {_EXPECTED}"
    except ImportError:
        problem = f"{proxy} needs the package socksio: pip install 'httpx[socks]'"
    except (httpx.InvalidURL, ValueError):
        problem = f"{proxy}: expected http://HOST:PORT"
    raise ClientError(f"{problem}; {proxy.remedy}")
