"""Small operations on a single thread of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Let the calling thread compute by itself in this context, on a CPU.

    Threads wait for each other at the end of each operation: longer than a small one takes, and longest where another
    process has the core of one of them.
    """
    count = torch.get_num_threads()
    if device.type != "cpu" or count == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
