from __future__ import annotations

import torch

from model.training.augment.augment import augment
from model.training.recipe import Augmentation


def test_resampling_begins_where_the_schedule_says() -> None:
    images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    settings = Augmentation(crop_padding=0, flip=False, resample=1.0, resample_since=0.5)

    def at(progress: float) -> torch.Tensor:
        return augment(images, (16, 16), settings, torch.Generator().manual_seed(0), progress)

    assert torch.equal(at(0.49), images)
    assert not torch.equal(at(0.5), images)
