"""Marks of tests that need an extension, so that the core's tests pass without it."""

from typing import Any, Final

import pytest

from model.extension import extensions

INSTALLED: Final = frozenset(extension.name for extension in extensions())
"""Names of the installed extensions."""


def needs(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if an extension is not installed."""
    return pytest.mark.skipif(
        name not in INSTALLED, reason=f"the extension {name} is not installed"
    )


needs_methods: Final = needs("methods")

TEACH: Final[dict[str, Any]] = {"teach": "taught"} if "teach" in INSTALLED else {}
"""Settings that let the routes of taught heads take part in a test of every route."""
