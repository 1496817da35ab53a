"""The patches that training drops."""

import pytest
import torch

from model.extensions.training.patch_dropout import drop_patches


def numbered(batch: int, prefix: int, patches: int) -> torch.Tensor:
    """Return tokens whose values are their numbers."""
    return (
        torch.arange(prefix + patches).float().reshape(1, -1, 1).expand(batch, -1, 4).contiguous()
    )


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(("rate", "kept"), [(0.5, 8), (0.25, 12), (0.9, 2), (0.99, 1)])
def test_kept_patches_stay_in_order(prefix: int, rate: float, kept: int) -> None:
    torch.manual_seed(0)
    result = drop_patches(numbered(50, prefix, 16), rate, prefix)
    assert result.shape == (50, prefix + kept, 4)
    numbers = result[:, :, 0]
    assert torch.equal(numbers[:, :prefix], numbered(50, prefix, 0)[:, :, 0])
    assert (numbers[:, prefix:] >= prefix).all()
    assert (numbers.diff(dim=1) > 0).all()
    assert torch.equal(result, numbers[:, :, None].expand(-1, -1, 4))  # whole tokens, unchanged


def test_dropped_patches_are_drawn_per_image() -> None:
    torch.manual_seed(0)
    kept = drop_patches(numbered(4000, 1, 16), 0.5, 1)[:, 1:, 0].long() - 1
    assert len({tuple(row) for row in kept[:100].tolist()}) > 90
    counts = kept.flatten().bincount(minlength=16)
    assert counts.min() > 1850
    assert counts.max() < 2150
