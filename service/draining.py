"""The end of a process: stop signals, the state while it drains, and its last log line.

signal                      `stopping`: not ready, but still serves
VIT_DRAIN_DELAY later       the listeners are closed
LAST_CALLERS_SECONDS later  `draining`: new requests are refused
VIT_DRAIN_TIMEOUT in all    the process ends, even if requests are unanswered
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

from service.addresses import SocketFiles
from service.background import Tasks

if TYPE_CHECKING:
    import uvicorn

    from service.http.connections import Connections

logger = logging.getLogger("vitserve")

LAST_CALLERS_SECONDS: Final = 1.0
"""Time in which clients that have just connected may send a request after the listeners close."""


class Lifecycle:
    """The state of a process.

    Attributes:
        stopping: whether the process is to end. It is not ready, but still serves, so that load
            balancers have time to stop using it.
        draining: whether it also refuses new work.
        answered, refused: counts of requests since `stopping`.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.draining = False
        self.answered = 0
        self.refused = 0
        self.exit_code = 0


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that drain the service; without SIGHUP if nohup has ignored it."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


def log_end(answered: int, refused: int) -> None:
    """Log the last line of a service: the counts of requests since the stop signal."""
    fields = {"answered": answered, "refused": refused}
    text = "stopped: since the signal, %(answered)d requests were answered and %(refused)d refused"
    logger.info(text, fields, extra={"fields": fields})


def exit_now(code: int) -> NoReturn:
    """End the process at once; its threads may be inside a decoder or a kernel."""
    logging.shutdown()
    os._exit(code)


class Drain:
    """Drains a uvicorn server: closes its listeners, and ends the process if requests take long.

    Args:
        timeout_seconds: longest time from `begin` to the end of the process.

    Attributes:
        logs_end: whether to log the counts of requests at the end.
        socket_files: files of the listening Unix sockets, removed at the end.
    """

    def __init__(
        self,
        server: "uvicorn.Server",
        connections: "Connections",
        lifecycle: Lifecycle,
        timeout_seconds: float,
    ) -> None:
        self._uvicorn = server
        self._connections = connections
        self._lifecycle = lifecycle
        self._timeout_seconds = timeout_seconds
        self._last_connections = Tasks()
        self.logs_end = True
        self.socket_files = SocketFiles([])

    def begin(self, delay_seconds: float) -> None:
        """Stop listening after a delay; the server ends when accepted requests are answered."""
        self._lifecycle.stopping = True
        loop = asyncio.get_running_loop()
        loop.call_later(delay_seconds, self._stop_listening)
        loop.call_later(self._timeout_seconds, self._give_up)

    def log_end(self) -> None:
        """Log the counts of requests since the stop signal."""
        if self.logs_end:
            log_end(self._lifecycle.answered, self._lifecycle.refused)

    def end_at_once(self, code: int) -> NoReturn:
        """End the process without waiting for requests."""
        self.socket_files.remove()
        exit_now(code)

    def _give_up(self) -> None:
        logger.warning("not all requests were answered within %g s: ending", self._timeout_seconds)
        self.log_end()
        self.end_at_once(self._lifecycle.exit_code)

    def _listening(self) -> Sequence[asyncio.Server]:
        """Return uvicorn's listeners; none before it has started, because a start may fail."""
        return getattr(self._uvicorn, "servers", ())

    def _stop_listening(self) -> None:
        loop = asyncio.get_running_loop()
        for server in self._listening():
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        # Close later: a closed asyncio server drops accepted sockets that still lack a protocol.
        loop.call_soon(self._close_listeners)

    def _close_listeners(self) -> None:
        loop = asyncio.get_running_loop()
        self._connections.ending_since = loop.time()
        # Within 0.1 s, uvicorn sees this and closes idle connections.
        self._uvicorn.should_exit = True
        loop.call_later(LAST_CALLERS_SECONDS, setattr, self._lifecycle, "draining", True)
        for server in self._listening():
            listeners = [
                socket.socket(fileno=os.dup(listener.fileno())) for listener in server.sockets
            ]
            server.close()
            for listener in listeners:
                self._accept_last(listener)

    def _accept_last(self, listener: socket.socket) -> None:
        """Accept the connections that the system queued, and close the listener.

        Closing alone would make the system reset these connections.
        """
        loop = asyncio.get_running_loop()
        config = self._uvicorn.config
        state = self._uvicorn.server_state
        listener.setblocking(False)
        # `accept` fails when the queue is empty, or the process has too many open files.
        with listener, contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                accepted = loop.connect_accepted_socket(
                    partial(self._connections.protocol, config, state), connection
                )
                self._last_connections.begin(accepted)


class Terminal:
    """The terminal that this process was started in, if any."""

    def __init__(self, descriptors: Sequence[int] = (0, 1, 2)) -> None:
        self._descriptors = [descriptor for descriptor in descriptors if os.isatty(descriptor)]

    def hang_up(self, reload: Callable[[], None]) -> bool:
        """Reload on SIGHUP, unless a closed terminal sent it; return whether it reloaded."""
        closed = bool(self._descriptors) and not any(map(os.isatty, self._descriptors))
        if not closed:
            reload()
        return not closed
