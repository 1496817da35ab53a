"""The states of a version: the table of transitions, which a version obeys."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from service.models.version import TRANSITIONS, State, Version
from tests.service.fakes import on_a_loop


def new_version(*, ready: bool = False, state: str = "loading") -> Version[Any]:
    engine: Any = SimpleNamespace(ready=ready, status=SimpleNamespace(state=state))
    return Version(engine)


def test_every_state_leads_to_closed() -> None:
    for state in get_args(State):
        seen: set[State] = {state}
        for _ in TRANSITIONS:
            seen |= {after for before, after in TRANSITIONS if before in seen}
        assert "closed" in seen


def test_a_closed_version_does_not_return() -> None:
    assert "closed" not in {before for before, _ in TRANSITIONS}


@on_a_loop
async def test_a_version_follows_its_engine() -> None:
    version = new_version()
    version.engine.ready = True
    states = [version.state]
    version.engine.ready = False
    version.engine.status.state = "failed"
    states.append(version.state)
    assert states == ["ready", "failed"]


@on_a_loop
async def test_an_unloaded_version_is_loaded_again() -> None:
    version = new_version()
    states = [version.state]
    for state in ("unloaded", "loading"):
        version.move(state)
        states.append(version.state)
    assert states == ["loading", "unloaded", "loading"]


@on_a_loop
async def test_a_retiring_version_ignores_engines() -> None:
    version = new_version(ready=True)
    version.move("retiring")
    version.engine.ready = False
    version.engine.status.state = "failed"
    assert version.state == "retiring"


@on_a_loop
@pytest.mark.parametrize("state", ["unloaded", "closed"])
async def test_a_version_cannot_skip_retiring(state: State) -> None:
    version = new_version(ready=True)
    with pytest.raises(AssertionError, match=f"from ready to {state}"):
        version.move(state)
