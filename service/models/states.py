"""The life of one version of a model, as a state machine.

              asked for             warm
    unloaded ----------> loading ----------> ready
       | ^                | | |               | |
       | '----------------' | '---> failed <--' |
       |     no memory      |          |        |
       '-----------+--------+----------+--------'
                   | replaced, unloaded, deleted, or the service stops
                   v
                leaving ------------------> gone
                         its last lease
                         is released

A name that is served has one current version, and perhaps older ones that are leaving. Unloading
replaces the current version by an unloaded one of the same number; the old one leaves.
"""

from collections.abc import Mapping
from typing import Final, Literal

State = Literal["unloaded", "loading", "ready", "failed", "leaving", "gone"]

# The states in which a name is listed.
ModelState = Literal["ready", "loading", "unloaded", "failed"]

TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    "unloaded": frozenset({"loading", "leaving"}),
    "loading": frozenset({"ready", "failed", "unloaded", "leaving"}),
    "ready": frozenset({"failed", "leaving"}),
    "failed": frozenset({"leaving"}),
    "leaving": frozenset({"gone"}),
    "gone": frozenset(),
}


def require_transition(before: State, after: State) -> None:
    """Assert that a version may change from one state to another."""
    assert after in TRANSITIONS[before], f"a model's version went from {before} to {after}"
