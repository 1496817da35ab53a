"""Garbage that is left of the start; whether the terminal that a process was started in was closed."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest

from service.http.lifecycle import Terminal, freeze_objects


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_left_of_the_start_is_collected_or_looked_through_no_more() -> None:
    left = weakref.ref(Cycle())
    freeze_objects()
    try:
        assert left() is None
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_objects_of_many_requests_are_not_looked_through_again_and_again() -> None:
    before = gc.get_threshold()
    freeze_objects()
    try:
        collections = gc.get_stats()[0]["collections"]
        requests = [[number] for number in range(20_000)]
        assert gc.get_stats()[0]["collections"] == collections
        del requests
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_terminal_is_looked_for_behind_input_output_and_errors(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = {descriptor}
    with monkeypatch.context() as patch:
        patch.setattr(os, "isatty", opened.__contains__)
        terminal = Terminal()
        before = terminal.was_closed()
        opened.clear()
        after = terminal.was_closed()
    assert (before, after) == (False, True)


def test_a_terminal_that_was_closed_is_told_from_none_and_from_one_that_is_open() -> None:
    ours, its = os.openpty()
    with Path(os.devnull).open() as nothing:
        terminal = Terminal((its, nothing.fileno()))
        assert not Terminal((nothing.fileno(),)).was_closed()
    assert not terminal.was_closed()
    os.close(ours)
    assert terminal.was_closed()
    os.close(its)
