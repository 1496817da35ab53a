"""A web process's server: uvicorn listens, and drains before it stops, as API clients need it."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from service.addresses import UNIX, SocketFiles, listen, port_of
from service.background import Tasks, keep_running
from service.http import LAST_CALLERS_SECONDS, MAX_CONNECTIONS, Application, Connections
from service.lifecycle import Lifecycle, exit_now, log_end, stop_signals
from service.settings import Settings

logger = logging.getLogger(__name__)

_OTHER_FILES: Final = 128

TRUSTED_PROXY: Final = "vit.trusted_proxy"
"""Key of a request's scope: whether its headers `X-Forwarded-...` are believed."""


class TrustedProxies(ProxyHeadersMiddleware):
    """Marks requests of the proxies of FORWARDED_ALLOW_IPS, uvicorn's own variable, and believes
    `X-Forwarded-For`.
    """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI connection."""
        peer = scope.get("client")
        if peer is None and scope["type"] == "http":
            scope["client"] = peer = (
                UNIX,
                0,
            )  # so that FORWARDED_ALLOW_IPS can name callers of a Unix socket
        scope[TRUSTED_PROXY] = (peer[0] if peer else None) in self.trusted_hosts
        await super().__call__(scope, receive, send)


def connection_limit(configured: int = MAX_CONNECTIONS) -> int:
    """Return how many connections this process may hold: `configured`, or fewer if the system
    allows fewer open files.

    The limit of open files is raised as far as needed, within what the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = configured + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return configured
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - _OTHER_FILES)


class Server:
    """One web process: uvicorn, with the shutdown that API clients need.

    SIGTERM or SIGINT: for `drain_delay` seconds it goes on serving, but is not ready; then it stops
    listening, finishes what it accepted, refuses what still comes, and returns, at the latest after
    `drain_timeout`. A second SIGTERM or SIGINT ends the process at once. SIGHUP stops it, too,
    unless `on_hang_up` handles it. By itself uvicorn would close its listener at the first SIGTERM,
    and end with 143.

    Args:
        beside: started with the server and cancelled at its end.
        on_hang_up: returns whether it has handled SIGHUP.
        is_supervised: the supervisor's signal drains, however often it comes, and SIGHUP is the
        supervisor's to handle.
    """

    def __init__(
        self,
        app: Application,
        settings: Settings,
        lifecycle: Lifecycle,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
        on_hang_up: Callable[[], bool] = lambda: False,
        *,
        is_supervised: bool = False,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._settings = settings
        self._lifecycle = lifecycle
        self._beside = beside
        self._on_hang_up = on_hang_up
        self._is_supervised = is_supervised
        self._hung_up = False
        self._socket_files = SocketFiles([])
        self._let_in_last = Tasks()
        self.connections = Connections(
            app, connection_limit(max_connections), idle_seconds=settings.keep_alive
        )
        trusted = os.environ.get("FORWARDED_ALLOW_IPS")
        config = uvicorn.Config(
            app if trusted is None else TrustedProxies(app, trusted),  # type: ignore[arg-type]  # uvicorn's own types
            http=self.connections.protocol,  # type: ignore[arg-type]  # it is called as a class is
            interface="asgi3",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # its warnings repeat what callers send
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=None,  # uvicorn would cut requests off; `_give_up` ends the process instead
        )
        self._uvicorn = uvicorn.Server(config)

    @property
    def is_listening(self) -> bool:
        """Return whether the server has started, and has not closed its listeners since."""
        return self._uvicorn.started and all(
            server.is_serving() for server in self._uvicorn.servers
        )

    @property
    def port(self) -> int:
        """Return the port of the started server, which differs from the setting when that is 0; 0
        without TCP.
        """
        return port_of(
            [listener for server in self._uvicorn.servers for listener in server.sockets]
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal or `stop`, on `sockets` if they are given, else on the settings'
        addresses.
        """
        with asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner:
            runner.run(self.serve(sockets))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the running event loop, see `run`."""
        loop, numbers = asyncio.get_running_loop(), stop_signals()
        if sockets is None:
            [sockets] = listen(self._settings.hosts, self._settings.port)
            self._socket_files = SocketFiles(sockets)
        serving = loop.create_task(self._uvicorn.serve(sockets))
        beside = [keep_running("connections", self.connections.watch)]
        if self._beside is not None:
            beside.append(keep_running("heartbeat", self._beside))
        await asyncio.sleep(0)  # uvicorn has taken the signals: they are taken from it
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await serving
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
            for task in beside:
                task.cancel()
            self._socket_files.remove()
        self._log_end()

    def stop(self, exit_code: int) -> None:
        """End the process in order, without the delay for load balancers: there is nothing left to
        serve.
        """
        self._lifecycle.exit_code = exit_code
        self._begin_to_stop(0.0)

    def drain(self) -> None:
        """Serve for the delay, then refuse new work, and stop when all accepted requests are
        answered.
        """
        if not self._lifecycle.stopping:
            self._begin_to_stop(self._settings.drain_delay)

    def _begin_to_stop(self, delay: float) -> None:
        self._lifecycle.stopping = True
        loop = asyncio.get_running_loop()
        loop.call_later(delay, self._stop_listening)
        loop.call_later(self._settings.drain_timeout, self._give_up)

    def _listening(self) -> Sequence[asyncio.Server]:
        """Return what listens; uvicorn has none before it has started, and a start may fail before
        that.
        """
        return getattr(self._uvicorn, "servers", ())

    def _stop_listening(self) -> None:
        loop = asyncio.get_running_loop()
        for server in self._listening():
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        loop.call_soon(
            self._close_listeners
        )  # who was just accepted has a protocol by then: a closed server drops it

    def _close_listeners(self) -> None:
        self.connections.is_ending = True
        self._uvicorn.should_exit = (
            True  # which uvicorn sees, and closes idle connections, within 0.1 s
        )
        asyncio.get_running_loop().call_later(
            LAST_CALLERS_SECONDS, setattr, self._lifecycle, "draining", True
        )
        for server in self._listening():
            listeners = [
                socket.socket(fileno=os.dup(listener.fileno())) for listener in server.sockets
            ]
            server.close()
            for listener in listeners:
                self._let_in(listener)

    def _let_in(self, listener: socket.socket) -> None:
        """Accept who is connected by the system, and close the listener: the system would reset
        their connections.
        """
        loop, config, state = (
            asyncio.get_running_loop(),
            self._uvicorn.config,
            self._uvicorn.server_state,
        )
        listener.setblocking(False)
        with (
            listener,
            contextlib.suppress(OSError),
        ):  # there is nobody left, or no file for one more
            while True:
                connection, _ = listener.accept()
                self._let_in_last.begin(
                    loop.connect_accepted_socket(
                        lambda: self.connections.protocol(config, state), connection
                    )
                )

    def _give_up(self) -> None:
        logger.warning(
            "not everything was answered within %g s: ending", self._settings.drain_timeout
        )
        self._log_end()
        self._socket_files.remove()
        exit_now(self._lifecycle.exit_code)

    def _log_end(self) -> None:
        if not self._is_supervised:  # else the supervisor tells it of all
            log_end(self._lifecycle.answered, self._lifecycle.refused)

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
            self._socket_files.remove()
            exit_now(128 + number)
        # systemd may send SIGHUP together with SIGTERM, and terminals send it twice: both ask for
        # one stop.
        self._hung_up = number == signal.SIGHUP
