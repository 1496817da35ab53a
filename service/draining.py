"""The end of a process: stop signals, the state while it drains, and its last log line."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import NoReturn

logger = logging.getLogger("vitserve")


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
