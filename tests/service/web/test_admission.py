from __future__ import annotations

from typing import Any

from service.web.admission import RefusalPace
from tests.service.web.apps import Clock


class Connection:
    """What a pace needs of a connection."""

    refused_at = float("-inf")


def test_who_comes_back_at_once_waits_for_a_second_and_so_do_all_beyond_many() -> None:
    clock = Clock()
    pace = RefusalPace(clock)
    connection: Any = Connection()
    delays = []
    for seconds in (0.0, 0.9, 1.9, 2.0):
        clock.now += seconds
        delays.append(pace.delay(connection))
    assert delays == [0, 1, 1, 0]
    clock.now += 10
    assert [pace.delay(None) for _ in range(501)] == [0] * 500 + [1]
    clock.now += 0.5
    assert [pace.delay(None) for _ in range(249)] == [0] * 249
