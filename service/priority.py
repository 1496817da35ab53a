"""Lower priority for threads whose work may wait."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

_NICENESS: Final = 10


def lower_priority() -> None:
    """Give this thread, on Linux, a tenth of the weight of others where they compete for a core."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # A process that was started with less priority still may not raise it.
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS))
