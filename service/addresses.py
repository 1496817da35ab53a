"""The addresses that the service listens on: TCP in both families, and Unix sockets."""

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

UNIX: Final = "unix:"
"""Prefix of an address whose rest is the path of a Unix socket."""

ANY: Final = ("0.0.0.0", "::")
"""Hosts that mean every address of this machine."""

_NAME: Final = re.compile(
    r"(?:[A-Za-z0-9_-]{1,63}\.)*(?=[A-Za-z0-9_-]*[A-Za-z])[A-Za-z0-9_-]{1,63}\.?"
)
_MAX_PATH_BYTES: Final = 107  # of a Unix socket
_BACKLOG: Final = 2048

# Errors for the IPv6 address of `localhost` if IPv6 is off.
_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def parse_listen_hosts(value: str) -> str:
    """Return comma-separated hosts in canonical form; raises `ValueError`."""
    hosts = [_listen_host(part.strip()) for part in value.split(",")]
    return ",".join(dict.fromkeys(hosts))


def _listen_host(text: str) -> str:
    if text.startswith(UNIX):
        path = re.sub("^/+", "/", text.removeprefix(UNIX))
        if (
            not path.startswith("/")
            or path.endswith("/")
            or len(os.fsencode(path)) > _MAX_PATH_BYTES
        ):
            raise ValueError(
                f"{text!r}: expected unix: and an absolute path of at most {_MAX_PATH_BYTES} bytes"
            )
        return f"{UNIX}{path}"
    host = text.removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if _NAME.fullmatch(host):
            return host
    raise ValueError(
        f"{text!r}: expected IP addresses (:: for all), names or unix:/PATH, "
        "separated by commas, without a port"
    )


@lru_cache(maxsize=1024)
def network_of(address: str) -> str:
    """Return an IPv4 address, or the /64 of an IPv6 address: a subscriber controls a whole /64."""
    if address.count(":") > 1:
        with suppress(ValueError):  # a proxy may send anything
            ipv6 = ipaddress.IPv6Address(address)
            return str(ipv6.ipv4_mapped or ipaddress.IPv6Network((int(ipv6) >> 64 << 64, 64)))
    return address


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host: a loopback address or a Unix socket."""
    if host.startswith(UNIX) or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tcp_hosts(hosts: Sequence[str]) -> list[str]:
    """Return the hosts that are not Unix sockets."""
    return [host for host in hosts if not host.startswith(UNIX)]


def in_url(host: str) -> str:
    """Return a host in the form of a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


class TcpAddress(NamedTuple):
    """An address of a host.

    Attributes:
        sockaddr: argument of `bind`; its second item is the port.
        takes_ipv4: whether an IPv6 socket also accepts connections over IPv4.
        is_optional: whether `listen` may do without it, because the host has other addresses.
    """

    host: str
    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]
    takes_ipv4: bool
    is_optional: bool


def tcp_addresses(hosts: Sequence[str]) -> Iterator[TcpAddress]:
    """Yield the addresses of all hosts except Unix sockets; raises `OSError` for unknown names."""
    for host in tcp_hosts(hosts):
        try:
            infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except socket.gaierror as error:
            raise OSError(error.errno, error.strerror, host) from None
        addresses = list(dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in infos))
        takes_ipv4 = host == "::" and "0.0.0.0" not in hosts
        for family, sockaddr in addresses:
            yield TcpAddress(host, family, sockaddr, takes_ipv4, is_optional=len(addresses) > 1)


def bind_tcp(address: TcpAddress, port: int, *options: int, listens: bool = False) -> socket.socket:
    """Return a socket bound to an address; raises `OSError` with the address as `filename`.

    Args:
        options: options of SOL_SOCKET to set.
        listens: whether the socket also listens.
    """
    bound = None
    try:
        bound = socket.socket(address.family, socket.SOCK_STREAM)
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        if address.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not address.takes_ipv4)
        bound.bind((address.sockaddr[0], port, *address.sockaddr[2:]))
        if listens:
            bound.listen(_BACKLOG)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise OSError(error.errno, error.strerror, f"{in_url(address.host)}:{port}") from None
    return bound


def listen(hosts: Sequence[str], port: int, count: int = 1) -> list[list[socket.socket]]:
    """Return each process's listening sockets; raises `OSError` with the address as `filename`.

    Each process has its own TCP sockets (SO_REUSEPORT), over which the kernel spreads connections
    evenly. With a shared socket, one process would accept a whole burst. A Unix socket is shared.

    Args:
        port: TCP port; 0 picks a free port, the same for all addresses.
        count: number of processes.
    """
    with ExitStack() as opened:
        processes = [_listen_tcp(hosts, port, opened, is_shared=count > 1)]
        port = port_of(processes[0])
        processes += [_listen_tcp(hosts, port, opened, is_shared=True) for _ in range(count - 1)]
        for host in hosts:
            if host.startswith(UNIX):
                shared = _listen_unix(Path(host.removeprefix(UNIX)))
                for listeners in processes:
                    listeners.append(opened.enter_context(shared.dup()))
                shared.close()
        opened.pop_all()
    return processes


def _listen_tcp(
    hosts: Sequence[str], port: int, opened: ExitStack, *, is_shared: bool
) -> list[socket.socket]:
    """Return listening sockets on all hosts except Unix sockets; `opened` closes them."""
    options = [socket.SO_REUSEADDR, socket.SO_REUSEPORT] if is_shared else [socket.SO_REUSEADDR]
    listeners: list[socket.socket] = []
    for address in tcp_addresses(hosts):
        try:
            listener = bind_tcp(address, port, *options, listens=True)
        except OSError as error:
            if address.is_optional and error.errno in _ABSENT:
                continue
            raise
        listeners.append(opened.enter_context(listener))
        port = port or port_of(listeners)
    return listeners


def _listen_unix(path: Path) -> socket.socket:
    """Return a socket that listens on a path; replace the file of a service that died."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(str(path))
        # As open to users of this machine as a loopback address; the folder may restrict access.
        path.chmod(0o666)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror, f"{UNIX}{path}") from None
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the file of a socket without a listener; raises `OSError` for any other file."""
    if not path.exists():
        return
    if not path.is_socket():
        raise OSError(errno.EEXIST, "a file that is not a socket has this name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(1.0)
        if caller.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    path.unlink()


def port_of(listeners: Sequence[socket.socket]) -> int:
    """Return the TCP port of listeners, 0 if all are Unix sockets."""
    ports = [
        listener.getsockname()[1] for listener in listeners if listener.family != socket.AF_UNIX
    ]
    return ports[0] if ports else 0


class SocketFiles:
    """The files of a service's Unix sockets, to be removed at its end."""

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        paths = [
            Path(listener.getsockname())
            for listener in listeners
            if listener.family == socket.AF_UNIX
        ]
        self._files = {path: _identity(path) for path in paths}

    def remove(self) -> None:
        """Remove the files, unless another service has replaced them."""
        for path, identity in self._files.items():
            if _identity(path) == identity:
                path.unlink(missing_ok=True)
        self._files = {}


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
