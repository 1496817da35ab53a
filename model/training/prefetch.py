"""Read one item ahead of its use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def read_ahead(read: Callable[[Key], Value], keys: Iterable[Key]) -> Iterator[Value]:
    """Yield `read(key)` of each key; a thread reads the next item while the present one is used.

    Raises:
        Exception: whatever `read` raises, when its item is asked for.
    """
    with ThreadPoolExecutor(1) as reader:
        following = None
        for key in keys:
            present, following = following, reader.submit(read, key)
            if present is not None:
                yield present.result()
        if following is not None:
            yield following.result()
