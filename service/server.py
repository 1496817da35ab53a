"""The server of a web process: uvicorn listens, and signals drain it; see `service.draining`."""

import asyncio
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final

import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from service.addresses import UNIX, SocketFiles, listen, port_of
from service.background import keep_running
from service.draining import Drain, Lifecycle, stop_signals
from service.http.application import HttpApplication
from service.http.connections import MAX_CONNECTIONS, Connections
from service.settings import Settings

logger = logging.getLogger(__name__)

_OTHER_FILES: Final = 128

TRUSTED_PROXY: Final = "vit.trusted_proxy"
"""Key of a request's scope: whether to trust its `X-Forwarded-...` headers."""


class TrustedProxies(ProxyHeadersMiddleware):
    """Applies `X-Forwarded-For` of trusted proxies, and marks their requests.

    uvicorn's own variable FORWARDED_ALLOW_IPS names the trusted proxies.
    """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI connection."""
        peer = scope.get("client")
        if peer is None and scope["type"] == "http":
            # FORWARDED_ALLOW_IPS can then name clients of a Unix socket.
            peer = (UNIX, 0)
            scope["client"] = peer
        host = peer[0] if peer else None
        scope[TRUSTED_PROXY] = host in self.trusted_hosts
        await super().__call__(scope, receive, send)


def connection_limit(configured: int) -> int:
    """Return how many connections this process may hold: `configured`, or fewer.

    Raises the soft limit of open files as far as needed and possible. The result is smaller than
    `configured` if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = configured + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return configured
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - _OTHER_FILES)


class Server:
    """One web process: uvicorn, with a shutdown that loses no accepted request.

    After SIGTERM or SIGINT, the server is not ready, but serves for `drain_delay` seconds. It then
    stops listening, finishes accepted requests, refuses new ones, and returns, at the latest after
    `drain_timeout`. A second SIGTERM or SIGINT ends the process at once. SIGHUP also stops it,
    unless `on_hang_up` handles it. uvicorn alone would close its listener at the first SIGTERM, and
    exit with 143.

    Args:
        beside: background task of the server, cancelled at its end.
        on_hang_up: returns whether it has handled SIGHUP.
        is_supervised: whether a supervisor runs this process. Its signals then always drain, and
            only the supervisor handles SIGHUP.
    """

    def __init__(
        self,
        app: HttpApplication,
        settings: Settings,
        lifecycle: Lifecycle,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
        on_hang_up: Callable[[], bool] = lambda: False,
        *,
        is_supervised: bool = False,
    ) -> None:
        self._settings = settings
        self._lifecycle = lifecycle
        self._beside = beside
        self._on_hang_up = on_hang_up
        self._is_supervised = is_supervised
        self._hung_up = False
        self.connections = Connections(
            app, connection_limit(MAX_CONNECTIONS), idle_seconds=settings.keep_alive
        )
        served: Any = app
        trusted = os.environ.get("FORWARDED_ALLOW_IPS")
        if trusted is not None:
            served = TrustedProxies(served, trusted)
        config = uvicorn.Config(
            served,
            http=self.connections.protocol,  # type: ignore[arg-type]  # uvicorn calls it as a class
            interface="asgi3",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # its warnings repeat text from clients
            access_log=False,
            server_header=False,
            proxy_headers=False,
            # With a timeout, uvicorn would cut requests off. `Drain` ends the process instead.
            timeout_graceful_shutdown=None,
        )
        self._uvicorn = uvicorn.Server(config)
        self._drain = Drain(self._uvicorn, self.connections, lifecycle, settings.drain_timeout)
        self._drain.logs_end = not is_supervised  # the supervisor logs the sum of its processes

    @property
    def is_listening(self) -> bool:
        """Return whether the server has started, and has not closed its listeners since."""
        return self._uvicorn.started and all(
            server.is_serving() for server in self._uvicorn.servers
        )

    @property
    def port(self) -> int:
        """Return the actual port of the started server; 0 without TCP."""
        return port_of(
            [listener for server in self._uvicorn.servers for listener in server.sockets]
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal or `stop`.

        Args:
            sockets: listening sockets. By default, the server listens on the settings' addresses.
        """
        with asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner:
            runner.run(self.serve(sockets))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the running event loop, see `run`."""
        loop = asyncio.get_running_loop()
        signals = stop_signals()
        if sockets is None:
            [sockets] = listen(self._settings.hosts, self._settings.port)
            self._drain.socket_files = SocketFiles(sockets)
        serving = loop.create_task(self._uvicorn.serve(sockets))
        background = [keep_running("connections", self.connections.watch)]
        if self._beside is not None:
            background.append(keep_running("heartbeat", self._beside))
        await asyncio.sleep(0)  # uvicorn has installed its signal handlers: replace them
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await serving
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            for task in background:
                task.cancel()
            self._drain.socket_files.remove()
        self._drain.log_end()

    def stop(self, exit_code: int) -> None:
        """Stop without the delay for load balancers, because the process can serve no request."""
        self._lifecycle.exit_code = exit_code
        self._drain.begin(0.0)

    def drain(self) -> None:
        """Serve for the delay, then refuse new work; stop when accepted requests are answered."""
        if not self._lifecycle.stopping:
            self._drain.begin(self._settings.drain_delay)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._is_supervised:
            if number != signal.SIGHUP:
                self.drain()
        elif not self._lifecycle.stopping:
            if number == signal.SIGHUP and self._on_hang_up():
                return
            logger.info("%s: stopping", number.name)
            self.drain()
        elif number != signal.SIGHUP and not self._hung_up:
            logger.warning("%s again: ending at once", number.name)
            self._drain.end_at_once(128 + number)
        # systemd may send SIGHUP together with SIGTERM, and terminals send it twice. Both request
        # one stop.
        self._hung_up = number == signal.SIGHUP
