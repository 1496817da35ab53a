"""The signals that stop a process, the end of one that cannot wait, and the terminal whose closing is a signal."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from typing import NoReturn


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that drain the service; SIGHUP only if it is not ignored, as it is under nohup."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for its threads: one may be deep in a decoder or a kernel."""
    logging.shutdown()
    os._exit(code)


class Terminal:
    """The terminal that this process was started in, if any."""

    def __init__(self, descriptors: Sequence[int] = (0, 1, 2)) -> None:
        self._descriptors = [descriptor for descriptor in descriptors if os.isatty(descriptor)]

    def was_closed(self) -> bool:
        """Return whether there was a terminal, and it is gone."""
        return bool(self._descriptors) and not any(map(os.isatty, self._descriptors))
