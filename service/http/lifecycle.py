"""The service's state between start and stop, shared by the server that decides and the routes that ask."""

from __future__ import annotations

import gc

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


def settle() -> None:
    """Exempt the objects of start-up, or of a model that took over, from garbage collection.

    They live for long, and looking through them again and again costs requests a few hundredths of their time.
    """
    gc.unfreeze()  # what was exempt and is no longer in use
    gc.collect()
    gc.freeze()
