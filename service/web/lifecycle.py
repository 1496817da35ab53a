"""Whether the service takes work: shared by the routes that ask and the server that decides."""

from __future__ import annotations

import gc

from service.errors import Draining


class Lifecycle:
    """Attributes:
    draining: set once, when the process is about to end.
    exit_code: what the process should end with.
    """

    def __init__(self) -> None:
        self.draining = False
        self.exit_code = 0

    def check(self) -> None:
        """Refuse new work while draining.

        Raises:
            Draining: the process is about to end.
        """
        if self.draining:
            raise Draining("the service is about to stop: try another instance")


def settle() -> None:
    """Take what start-up made out of the garbage collector's sight: it stays until the end, and looking through all of
    it again and again costs each request a few hundredths of its time.
    """
    gc.collect()
    gc.freeze()
