from __future__ import annotations

import pytest
import torch

from model.training.optimisers import update_average, warmed_up_decay

pytestmark = pytest.mark.timeout(120)  # models are trained


def test_the_average_is_the_formula_applied_at_each_step() -> None:
    average, expected = [torch.tensor([1.0, 2.0])], torch.tensor([1.0, 2.0])
    for step in range(5):
        weights = torch.full((2,), float(step))
        update_average(average, [weights], 0.9)
        expected = 0.9 * expected + 0.1 * weights
    torch.testing.assert_close(average[0], expected)


def test_early_steps_keep_less_and_late_ones_the_decay() -> None:
    assert warmed_up_decay(0.999, 0) == pytest.approx(0.1)
    assert warmed_up_decay(0.999, 90) == pytest.approx(0.91)
    assert warmed_up_decay(0.999, 1_000_000) == 0.999
    assert warmed_up_decay(0.05, 0) == 0.05
