"""Fixtures of the tests of predictors."""

import pytest

from model.runtime.torch_backend import TorchBackend


@pytest.fixture
def no_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that computes a map in a pass of its own."""

    def refuse(*_: object) -> None:
        raise AssertionError("a pass of its own")

    monkeypatch.setattr(TorchBackend, "explain", refuse)
