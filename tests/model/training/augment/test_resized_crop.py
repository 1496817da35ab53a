from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from model.training.augment.boxes import Boxes, random_boxes, random_resized_crop, resize_boxes


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [(12, 20), (64, 48), (30, 40)], ids=["smaller", "larger", "mixed"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_box_is_resized_as_torch_resizes_the_part_with_antialiasing(size: tuple[int, int], channels: int) -> None:
    images = torch.randint(0, 256, (3, channels, 40, 50), dtype=torch.uint8, generator=seeded())
    boxes = Boxes(*(torch.tensor(v) for v in ([0, 5, 11], [0, 7, 20], [40, 31, 29], [50, 33, 17])))
    resized = resize_boxes(images, boxes, size)
    for image, result, top, left, height, width in zip(images, resized, *boxes, strict=True):
        part = image[None, :, top : top + height, left : left + width].float()
        expected = F.interpolate(part, size=size, mode="bilinear", antialias=True, align_corners=False)[0]
        assert (result.float() - expected).abs().max() <= 0.51


def test_the_whole_image_at_its_own_size_is_the_image() -> None:
    images = torch.randint(0, 256, (2, 3, 9, 13), dtype=torch.uint8, generator=seeded())
    whole = Boxes(*(torch.tensor([v, v]) for v in (0, 0, 9, 13)))
    assert torch.equal(resize_boxes(images, whole, (9, 13)), images)


def test_boxes_lie_within_the_image_and_their_areas_and_shapes_within_the_bounds() -> None:
    top, left, height, width = random_boxes(5000, (60, 80), (0.2, 0.6), (3 / 4, 4 / 3), seeded())
    assert top.min() == left.min() == 0
    assert (top + height).max() == 60
    assert (left + width).max() == 80
    area, ratio = (height * width).float() / 4800, width / height
    assert 0.18 < area.min() < 0.23
    assert 0.57 < area.max() < 0.63
    assert area.mean() == pytest.approx(0.39, abs=0.02)
    assert 0.71 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.4


def test_a_box_that_cannot_fit_is_empty() -> None:
    boxes = random_boxes(10, (4, 400), (0.5, 1.0), (3 / 4, 4 / 3), seeded())
    assert all(part.eq(0).all() for part in boxes)
    assert not boxes.mask((4, 400)).any()


def test_long_images_give_their_middle_as_in_torchvision() -> None:
    image = torch.zeros((1, 1, 6, 90), dtype=torch.uint8)
    image[..., 41:49] = 200  # the middle 8 columns: 6 * 4/3
    assert random_resized_crop(image, (6, 8), 0.9, seeded()).eq(200).all()


def test_resized_crops_follow_their_generator() -> None:
    images = torch.randint(0, 256, (8, 3, 40, 40), dtype=torch.uint8, generator=seeded())
    first = random_resized_crop(images, (16, 24), 0.08, seeded(1))
    assert first.shape == (8, 3, 16, 24)
    assert first.dtype == torch.uint8
    assert torch.equal(first, random_resized_crop(images, (16, 24), 0.08, seeded(1)))
    assert not torch.equal(first, random_resized_crop(images, (16, 24), 0.08, seeded(2)))
