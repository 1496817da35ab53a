"""Lower priority for threads whose work may wait, and the time for which a thread waited for a core."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Final

_NICENESS: Final = 10


def lower_priority() -> None:
    """Give this thread, on Linux, a tenth of the weight of others where they compete for a core."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # A process that was started with less priority still may not raise it.
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS))


def seconds_without_core(thread: int) -> float:
    """Return for how long a thread of this process, named by its native id, could run and had to wait for a core.

    0 where the system has no such figure: only Linux has, unless it is built without statistics of its scheduler.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
