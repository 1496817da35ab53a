"""The container's health check: exit code 0 if the service is ready, else 1 and the reason.

It checks readiness instead of liveness, because `docker compose up --wait`, `depends_on:
service_healthy` and proxies send requests to a healthy container.
"""

import http.client
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class Connection(http.client.HTTPConnection):
    """A connection to an address of VIT_HOST: IPv4, IPv6, a name, or `unix:/PATH`."""

    def connect(self) -> None:
        """Connect to the path of a Unix socket, or to the port of a host."""
        if not self.host.startswith("unix:"):
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host.removeprefix("unix:"))


def setting(name: str, arguments: Sequence[str]) -> str:
    """Return a setting from the arguments of the service, or else from the environment."""
    value = os.environ.get(f"VIT_{name.upper()}", "")
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, is_joined, text = argument.partition("=")
        if flag == f"--{name}":
            value = text if is_joined else following
    return value.strip(" \t\"'")


def address(hosts: str) -> str:
    """Return an address for reaching a service on these hosts from this machine."""
    host = hosts.split(",", maxsplit=1)[0].strip().removeprefix("[").removesuffix("]")
    return "127.0.0.1" if host in ("", "0.0.0.0", "::") else host


def main() -> str | None:
    """Ask /readyz.

    Returns:
        None if the service is ready, else the reason.
    """
    # The service is process 1, or the child of an init with the same arguments.
    arguments: list[str] = []
    with suppress(OSError):  # hidden by the mount options of /proc
        arguments = Path("/proc/1/cmdline").read_text(errors="replace").split("\0")
    # The service takes PORT, too; see service.setting_warnings.
    port = setting("port", arguments) or os.environ.get("PORT", "")
    host = address(setting("host", arguments))
    # Not urllib.request, which would use a proxy of the environment.
    connection = Connection(host, int(port) if port.isdigit() else 8000, timeout=4)
    try:
        # The service always answers for this host.
        connection.request("GET", "/readyz", headers={"Host": "127.0.0.1"})
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"/readyz: {error}"
    return None if answer.status == http.client.OK else f"/readyz: {answer.status} {body}"


if __name__ == "__main__":
    sys.exit(main())
