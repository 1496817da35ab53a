"""Tells the SIGHUP of a terminal that was closed from one that an operator sends."""

from __future__ import annotations

import os
from collections.abc import Sequence


class Terminal:
    """The terminal that this process was started in, if any."""

    def __init__(self, descriptors: Sequence[int] = (0, 1, 2)) -> None:
        self._descriptors = [descriptor for descriptor in descriptors if os.isatty(descriptor)]

    def was_closed(self) -> bool:
        """Return whether there was a terminal, and it is gone."""
        return bool(self._descriptors) and not any(map(os.isatty, self._descriptors))
