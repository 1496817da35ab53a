"""A look at whether the process still gets file descriptors: without them the event loop drops callers in silence."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 60.0


class DescriptorWatch:
    """Logs an error when the process has no file descriptor left, at most once a minute.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until = float("-inf")

    def check(self) -> None:
        """Take a file descriptor and give it back."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            now = self._clock()
            if error.errno in (errno.EMFILE, errno.ENFILE) and now >= self._quiet_until:
                self._quiet_until = now + _QUIET_SECONDS
                logger.error("no file descriptors are left (ulimit -n): connections are dropped unanswered")
