"""The texts that a web process takes an engine to know."""

from typing import Any

from service.web.service import KnownTexts


class Engine:
    """An engine, of which only the identity counts."""


def test_a_new_engine_knows_no_texts() -> None:
    texts = KnownTexts()
    engine: Any = Engine()
    texts.add(engine, ["a cat", "a dog"])
    assert texts.count_new(engine, ["a cat", "a bird"]) == 1
    del engine  # its memory, and so its id, may be a new engine's
    engine = Engine()
    assert texts.count_new(engine, ["a cat", "a bird"]) == 2
