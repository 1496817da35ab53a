"""What a request holds of the memory that it took."""

import gc
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from tests.service.fakes import until

NO_PICTURE: Final = bytes(5 << 20)
"""A file that is refused."""


@asynccontextmanager
async def little_stays() -> AsyncIterator[None]:
    """Check that less than a fifth of a picture remains in memory without garbage collection.

    A thread's last references may outlive its answer by a moment, so this waits for them.
    """
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        await until(lambda: tracemalloc.get_traced_memory()[0] - before < len(NO_PICTURE) // 5)
    finally:
        tracemalloc.stop()
        gc.enable()
