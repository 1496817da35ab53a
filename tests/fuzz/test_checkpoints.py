"""Hostile checkpoints are refused in one line, in little time and memory; damaged ones are refused or right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.checkpoints import MAKERS, damage, measured

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("name", MAKERS)
def test_a_hostile_checkpoint_costs_a_refusal_in_one_line(name: str, tmp_path: Path) -> None:
    cost = measured(*MAKERS[name](tmp_path))
    assert not cost.fault, cost


def test_damaged_checkpoints_are_refused_or_right(tmp_path: Path) -> None:
    tally = damage(tmp_path, seed=0, out=tmp_path, cases=120)
    assert not tally.faults, tally.faults[:3]
    assert tally.statuses[200] > 2 < tally.statuses[400]
