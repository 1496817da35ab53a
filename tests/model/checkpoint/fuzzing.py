"""The check of randomly damaged files; `make fuzz` draws more examples."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError

EXAMPLES = os.environ.get("EXAMPLES")

TIMEOUT_SECONDS = 0 if EXAMPLES else 120

FUZZ = settings(
    max_examples=int(EXAMPLES or 25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


PYTHON = re.compile(r"Error\b|from empty|has no attr|NoneType|iterable|indices must|unpack|pickle")


def right_or_refused(source: Path, **options: Any) -> None:
    """Check that a file is refused in one line, or gives a model that follows its config."""
    try:
        checkpoint = load_checkpoint(str(source), **options)
        model = checkpoint.build()
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert not PYTHON.search(str(error)), "no words of Python's"
        return
    config = checkpoint.config
    with torch.inference_mode():
        logits = model(torch.zeros(1, config.in_channels, *config.image_size)).logits
    assert logits.shape == (1, len(checkpoint.labels))
