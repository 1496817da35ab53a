"""What the plain reference cannot show: tokens that share the highest value of a feature."""

from __future__ import annotations

import torch

from model.explanation.frozen_gradients import through_pooling
from tests.model.explanation.test_methods import model_of


def test_tokens_with_the_same_highest_value_share_its_gradient() -> None:
    config = model_of("max").config
    skipped = config.prefix_tokens
    x = torch.zeros(1, config.tokens, config.width)
    x[0, skipped : skipped + 2, 0] = 5.0  # the highest of the first feature, twice
    x[0, skipped, 1:] = 1.0
    gradient = torch.full((1, 1, config.width), 4.0)
    found = through_pooling(x, gradient, config)
    assert found[0, skipped : skipped + 2, 0].tolist() == [2.0, 2.0]
    assert found[0, skipped, 1:].tolist() == [4.0] * (config.width - 1)
    assert found.sum().item() == 4.0 * config.width
