from __future__ import annotations

import numpy as np
import pytest
import torch

from model.config import ResNetStem
from model.errors import InputError
from model.insight.analyses import patch_filters
from model.network.vit import VisionTransformer
from tests.model.insight.models import random_model


@pytest.mark.parametrize("embedding", ["convolution", "linear"])
def test_patch_filters_are_the_directions_the_filters_were_made_from(embedding: str) -> None:
    model = random_model(patch_embedding=embedding)
    generator = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(torch.randn(192, 2, generator=generator)).Q  # [C*P*P, 2]
    strength = torch.randn(16, 2, generator=generator) * torch.tensor([5.0, 1.0])
    weight = strength @ basis.T + 7.0  # what all filters share is no difference between them
    with torch.no_grad():
        parameter = model.get_parameter("patch_embed.proj.weight")
        parameter.copy_(weight.reshape(parameter.shape))
    found = patch_filters(model)
    assert found.components.shape == (16, 3, 8, 8)
    assert found.explained[:2].sum().item() == pytest.approx(1, abs=1e-4)
    spanned = found.components[:2].reshape(2, -1) @ basis
    np.testing.assert_allclose((spanned @ spanned.T).numpy(), np.eye(2), atol=1e-3)
    assert found.explained.tolist() == sorted(found.explained.tolist(), reverse=True)
    assert patch_filters(model, 3).components.shape == (3, 3, 8, 8)


def test_a_hybrid_has_no_patch_filters() -> None:
    model = random_model(image_size=(32, 32), patch_size=16, stem=ResNetStem(layers=(1,)))
    with pytest.raises(InputError, match="features of a stem of convolutions"):
        patch_filters(model)


@pytest.mark.shared
def test_patch_filters_of_a_trained_model_are_far_from_even(deit: VisionTransformer) -> None:
    found = patch_filters(deit)
    # 192 filters of white noise would need far more than 28 of 192 directions for this share.
    assert found.explained.sum().item() > 0.4
    centre = found.components[:, :, 4:12, 4:12].square().sum(dim=(1, 2, 3))
    assert (centre > 0.25).float().mean() > 0.8  # the middle quarter of a patch holds more than its share
