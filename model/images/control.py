"""How the caller of a decoder or a renderer follows its work and ends it early."""

from __future__ import annotations


class WorkControl:
    """Follows one picture's work; any method may raise, which ends the work with that error. This one never does.

    What is raised is no `OSError`, `ValueError` or other error of a decoder: those count as the picture's fault.
    """

    def estimated(self, cost: float) -> None:
        """Take note of what decoding will cost, before pixels are allocated.

        Args:
            cost: in pixels of an 8-bit RGB PNG that take as long.
        """

    def check(self) -> None:
        """Return if the work is still wanted; called between its steps, from the thread that does it."""


UNCONTROLLED = WorkControl()
"""Lets everything run to its end."""
