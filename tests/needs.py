"""Marks of tests that need an extension, so that the core's tests pass without it."""

from typing import Final

import pytest

from model.methods import methods

needs_methods: Final = pytest.mark.skipif(
    "gae" not in methods(), reason="the extension of explanation methods is not installed"
)
