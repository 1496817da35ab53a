"""uvicorn, with the shutdown that API clients need: drain first, then stop listening, exit 0.

By itself uvicorn closes its listener at the first SIGTERM. A load balancer that still sends requests would see refused
connections. At the end uvicorn raises the signal again, and the exit code would be 143.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, cast

import uvicorn

from service.http.connections import DescriptorWatch, UnreadAnswers, connection_limit
from service.http.lifecycle import Lifecycle, exit_now, stop_signals
from service.http.listening import Acceptor
from service.http.protocol import Application, HttpProtocol
from service.settings import Settings

logger = logging.getLogger(__name__)

# Load balancers keep idle connections for about a minute; the side that answers must keep them longer.
_KEEP_ALIVE_SECONDS = 75

_UNSENT_BYTES = 128 << 10
"""Bytes of a connection's answers that the kernel takes beyond those on their way; `UnreadAnswers` bounds the rest.

By itself the kernel takes 2.5 MiB: 300 callers who hardly read a file of 1.7 MB had 690 MiB of its memory.
"""

_BACKLOG = 2048
"""Connections that the kernel holds until they are accepted."""


class Server(uvicorn.Server):
    """One web process.

    SIGTERM or SIGINT: for `drain_delay` seconds it goes on listening while new work is answered 503;
    then it stops listening, finishes what it accepted, and returns, at the latest after `drain_timeout`.
    A second SIGTERM or SIGINT ends the process at once. SIGHUP drains, too, unless `on_hang_up` handles it.

    Args:
        beside: started with the server and run until the event loop ends; it proves to others that the loop turns.
        on_hang_up: returns whether it has handled SIGHUP.
    """

    def __init__(
        self,
        app: Application,
        settings: Settings,
        lifecycle: Lifecycle,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
        on_hang_up: Callable[[], bool] = lambda: False,
    ) -> None:
        protocol = partial(
            HttpProtocol,
            app=app,
            max_connections=connection_limit(settings.max_connections),
            on_connection=self._on_connection,
            unread_answers=UnreadAnswers(settings.max_receiving_bytes // 4),
        )
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            http=cast(Any, protocol),
            ws="none",
            lifespan="on",
            loop="auto",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing reads what proxies say of the caller
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=None,  # uvicorn would cut requests off; `_give_up` ends the process instead
        )
        super().__init__(config)
        self._settings = settings
        self._lifecycle = lifecycle
        self._beside = beside
        self._on_hang_up = on_hang_up
        self._beside_task: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None
        self._hung_up = False
        self._descriptors = DescriptorWatch()
        self._acceptor: Acceptor | None = None

    @property
    def port(self) -> int:
        """Return the port of the started server, which differs from the setting when that is 0."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Take the signals over from uvicorn."""
        loop = asyncio.get_running_loop()
        numbers = stop_signals()
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start what runs beside the server, and serve."""
        if self._beside is not None:
            self._beside_task = asyncio.create_task(self._beside())
        await super().startup(sockets)
        listeners = [listener for server in self.servers for listener in server.sockets]
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # the connections of a listener inherit it
            for listener in listeners:
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._acceptor = Acceptor(listeners, self._make_protocol)

    def _on_connection(self) -> None:
        if self._acceptor is not None:
            self._acceptor.accepted()

    def _make_protocol(self) -> asyncio.Protocol:
        factory = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return factory(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections that the kernel holds, then shut down as uvicorn does."""
        if self._acceptor is not None:
            await self._acceptor.close()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Check for exhausted file descriptors, and do what uvicorn does ten times a second."""
        self._descriptors.check()
        return await super().on_tick(counter)

    def stop(self, exit_code: int) -> None:
        """End the process in order, without the delay for load balancers: there is nothing left to serve."""
        self._lifecycle.draining = True
        self._lifecycle.exit_code = exit_code
        self.should_exit = True
        self._bound_draining()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._drain is None:
            if number == signal.SIGHUP and self._on_hang_up():
                return
            logger.info("%s: draining", number.name)
            self.drain()
        elif number != signal.SIGHUP and not self._hung_up:
            logger.warning("%s again: ending at once", number.name)
            exit_now(128 + number)
        # systemd may send SIGHUP together with SIGTERM, and terminals send it twice: both ask for one stop.
        self._hung_up = number == signal.SIGHUP

    def drain(self) -> None:
        """Refuse new work, and stop when all accepted requests are answered."""
        if self._drain is None:
            self._lifecycle.draining = True
            self._drain = asyncio.get_running_loop().create_task(self._drain_then_stop())

    async def _drain_then_stop(self) -> None:
        self._bound_draining()
        await asyncio.sleep(self._settings.drain_delay)
        self.should_exit = True

    def _bound_draining(self) -> None:
        asyncio.get_running_loop().call_later(self._settings.drain_timeout, self._give_up)

    def _give_up(self) -> None:
        logger.warning("not everything was answered within %g s: ending", self._settings.drain_timeout)
        exit_now(self._lifecycle.exit_code)
