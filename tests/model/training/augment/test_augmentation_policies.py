from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.training.augment import image_operations
from model.training.augment.image_operations import OPERATIONS, rand_augment, trivial_augment


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(count: int = 64, channels: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, channels, 16, 16), dtype=torch.uint8, generator=seeded())


class Recorder:
    """In place of `apply_operations`: notes what was chosen, changes nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __call__(self, images: Tensor, choice: Tensor, strength: Tensor) -> Tensor:
        self.calls.append((choice, strength))
        return images


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(image_operations, "apply_operations", recorder)
    return recorder


def test_trivial_augment_draws_all_operations_and_strengths_evenly(recorder: Recorder) -> None:
    trivial_augment(noise(1).expand(14_000, -1, -1, -1), 0.5, seeded())
    ((choice, strength),) = recorder.calls
    assert (choice == -1).float().mean() == pytest.approx(0.5, abs=0.02)
    counts = choice[choice >= 0].bincount(minlength=len(OPERATIONS))
    assert counts.min() > 400
    assert counts.max() < 600
    assert strength.min() < -0.99
    assert strength.max() > 0.99
    assert strength.abs().mean() == pytest.approx(0.5, abs=0.02)


def test_rand_augment_applies_as_many_operations_as_told_all_of_one_strength(recorder: Recorder) -> None:
    rand_augment(noise(1).expand(14_000, -1, -1, -1), 3, 7.0, seeded())
    assert len(recorder.calls) == 3
    for choice, strength in recorder.calls:
        assert choice.bincount(minlength=len(OPERATIONS)).min() > 800
        torch.testing.assert_close(strength.abs(), torch.full((14_000,), 0.7))
        assert (strength > 0).float().mean() == pytest.approx(0.5, abs=0.02)
    assert not torch.equal(recorder.calls[0][0], recorder.calls[1][0])


def test_policies_that_are_off_return_their_input() -> None:
    images = noise(4)
    assert trivial_augment(images, 0.0, seeded()) is images
    assert rand_augment(images, 0, 9.0, seeded()) is images


@pytest.mark.parametrize("channels", [1, 3])
def test_policies_follow_their_generator_and_leave_their_input_alone(channels: int) -> None:
    images = noise(channels=channels)
    before = images.clone()
    for policy in (
        lambda seed: trivial_augment(images, 1.0, seeded(seed)),
        lambda s: rand_augment(images, 2, 9, seeded(s)),
    ):
        first, again, other = policy(1), policy(1), policy(2)
        assert torch.equal(images, before)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert first.shape == images.shape
        assert first.dtype == torch.uint8


def test_a_magnitude_of_zero_leaves_geometry_and_colours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    strengthless = {k: v for k, v in OPERATIONS.items() if k not in ("auto_contrast", "equalize")}
    monkeypatch.setattr(image_operations, "OPERATIONS", strengthless)
    images = noise().clamp_max(254)  # solarize begins at 255
    result = rand_augment(images, 4, 0.0, seeded())
    assert (result.int() - images.int()).abs().max() <= 1
