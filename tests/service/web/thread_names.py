"""The threads on which functions run."""

import threading
from collections.abc import Callable
from typing import Any, Final

import pytest

BIG: Final = "documents_0"
"""The thread of large documents."""

LOOP: Final = threading.main_thread().name


class ThreadNames:
    """Collects in `names` the threads on which the watched functions run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        self._monkeypatch = monkeypatch

    def watch(self, module: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(module, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            self.names.add(threading.current_thread().name)
            return original(*arguments, **options)

        self._monkeypatch.setattr(module, name, watched)
