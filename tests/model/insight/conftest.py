from __future__ import annotations

from pathlib import Path

import pytest

from model.checkpoint import load_checkpoint
from model.network.vit import VisionTransformer


@pytest.fixture(scope="session")
def deit(shared: Path) -> VisionTransformer:
    return load_checkpoint(str(shared / "weights" / "deit_tiny_imagenet")).build()
