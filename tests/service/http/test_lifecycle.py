from __future__ import annotations

import gc
import weakref

from service.http.lifecycle import settle


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_left_of_the_start_is_collected_or_looked_through_no_more() -> None:
    left = weakref.ref(Cycle())
    settle()
    try:
        assert left() is None
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
