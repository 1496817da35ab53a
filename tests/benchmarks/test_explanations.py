"""The measure of how faithful maps are: a map that is right by construction does well, and noise does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks.explanations import (
    RANDOM,
    Maps,
    counted_quarters,
    main,
    measure,
    mosaic,
    quarter_share,
)

PLACES = torch.tensor([0, 5, 9, 14])
"""The bright patch, of 4 x 4, of pictures of each class."""


def picture(number: int) -> Tensor:
    """16 x 16 pixels, of class `number` modulo four."""
    pixels = torch.zeros(16)
    pixels[PLACES[number % 4]] = 1.0
    return pixels.reshape(1, 4, 4).repeat_interleave(4, 1).repeat_interleave(4, 2)


def brightness(pixels: Tensor, classes: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(pixels, 4)[:, 0]


def score(pixels: Tensor) -> Tensor:
    """A class's score is how bright its patch is."""
    return brightness(pixels, PLACES).flatten(1)[:, PLACES]


def noise(pixels: Tensor, classes: Tensor) -> Tensor:
    return torch.rand((len(classes), 4, 4), generator=torch.Generator().manual_seed(3))


def test_a_right_map_does_better_than_noise_in_deletion_and_insertion() -> None:
    methods: dict[str, Maps] = {RANDOM: noise, "right": brightness}
    found = measure(score, methods, picture, 8, steps=16)
    (deleted, inserted, _), (by_chance, inserted_by_chance, _) = found["right"].means(), found[RANDOM].means()
    assert deleted == pytest.approx(1 / 32)  # gone with the first of sixteen patches
    assert by_chance is not None
    assert by_chance > 0.2
    assert inserted is not None
    assert inserted_by_chance is not None
    assert inserted > inserted_by_chance
    assert len(found["right"].deletion) == 8


def test_a_mosaic_has_four_pictures_in_reading_order_and_counts_single_classes() -> None:
    whole = mosaic(torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 1, 5, 6))
    assert whole[0].tolist() == [[0] * 3 + [1] * 3] * 2 + [[2] * 3 + [3] * 3] * 3
    assert counted_quarters(torch.arange(40.0), torch.tensor([39, 38, 38, 2])) == [0]
    left = torch.tensor([[1.0, 1.0, 0.0]] * 3)
    assert [quarter_share(left, quarter) for quarter in range(4)] == pytest.approx([0.375, 0.125, 0.375, 0.125])
    assert quarter_share(-left, 0) == 0.25


@pytest.mark.timeout(60)
def test_the_bundled_model_is_measured_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        colours = np.random.default_rng(number).integers(0, 256, (2, 2, 3), dtype=np.uint8)
        Image.fromarray(colours.repeat(16, axis=0).repeat(16, axis=1)).save(tmp_path / f"{number}.png")
    assert main(["--data", str(tmp_path), "--steps", "4", "--methods", "cls", "gae"]) == 0
    told = capsys.readouterr().out
    assert "4 pictures, 4 steps" in told
    assert [line.split()[1] for line in told.splitlines() if line.startswith("| ")][2:] == [RANDOM, "cls", "gae"]
