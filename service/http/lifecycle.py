"""The life of a process: its state between start and stop, the signals that stop it, and its end."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Sequence
from typing import NoReturn

from service.errors import Draining


class Lifecycle:
    """The state of a process that may be about to end and take no new work, and its exit code."""

    def __init__(self) -> None:
        self.draining = False
        self.exit_code = 0

    def check(self) -> None:
        """Refuse new work: raises `Draining` when the process is about to end."""
        if self.draining:
            raise Draining("the service is about to stop: try another instance")


def freeze_objects() -> None:
    """Exempt the objects of start-up, or of a model that took over, from garbage collection.

    They live long. To traverse them in each collection would cost requests a few hundredths of their time.
    """
    gc.unfreeze()  # objects that were exempt may be no longer in use
    gc.collect()
    gc.freeze()


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that drain the service; SIGHUP only if it is not ignored, as it is under nohup."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for its threads, which may be inside a decoder or a kernel."""
    logging.shutdown()
    os._exit(code)


class Terminal:
    """The terminal that this process was started in, if any."""

    def __init__(self, descriptors: Sequence[int] = (0, 1, 2)) -> None:
        self._descriptors = [descriptor for descriptor in descriptors if os.isatty(descriptor)]

    def was_closed(self) -> bool:
        """Return whether the process had a terminal that is closed now."""
        return bool(self._descriptors) and not any(map(os.isatty, self._descriptors))
