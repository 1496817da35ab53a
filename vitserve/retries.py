"""When a client sends a request again: only after temporary failures, with growing pauses."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Final

from vitserve.errors import ClientError

_MAX_PAUSE_SECONDS: Final = 8.0
"""Longest pause unless the service asks for a longer one."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a client repeats a request after a temporary refusal or a broken connection.

    Attributes:
        tries: most times that a request is sent; 1 never repeats it.
        seconds: time from the first try to the start of the last one.
        first_pause: longest pause in seconds after the first try, unless the service asks for more;
            the limit doubles for each later pause, up to 8 seconds.
        clock: monotonic seconds.
        jitter: a random number in [0, 1), which spreads callers that were refused together.
    """

    tries: int = 5
    seconds: float = 60.0
    first_pause: float = 0.25
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not isinstance(self.tries, int) or self.tries < 1:
            raise ValueError(
                f"tries {self.tries!r}: expected an integer of at least 1, which never repeats"
            )
        for name in ("seconds", "first_pause"):
            value: object = getattr(self, name)
            if not isinstance(value, Real) or not float(value) >= 0:
                raise ValueError(f"{name} {value!r}: expected seconds of at least 0")


def pause_after(failure: ClientError, tries: int, retries: Retries) -> float:
    """Return the seconds to wait after this many tries, `Retry-After` included."""
    pause: float = min(retries.first_pause * 2 ** (tries - 1), _MAX_PAUSE_SECONDS)
    if failure.retry_after is None:
        return pause * (1 + retries.jitter()) / 2
    return failure.retry_after + pause * retries.jitter()
