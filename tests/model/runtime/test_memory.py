"""What a model takes is measured whatever other threads import."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from model.runtime.memory import Meter


def test_a_torch_that_another_thread_is_importing_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert Meter().size(1000, "float32") >= 4000
