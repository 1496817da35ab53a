"""Fixtures: a local hub, and a plain state dict."""

from pathlib import Path

import pytest
import torch

from tests.extensions.hub.conftest import hub, load
from tests.timm_reference import timm

__all__ = ["hub", "load"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain state dict of a whole ViT-Ti/16 at 48 px with three classes."""
    model = timm().create_model("vit_tiny_patch16_224", img_size=48, num_classes=3)
    file = tmp_path_factory.mktemp("tiny") / "weights.pth"
    torch.save(model.state_dict(), file)
    return file
