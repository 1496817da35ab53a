"""How far bfloat16 is from float32, on real weights and real pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model.checkpoint import load_checkpoint
from model.images.preprocess import preprocess

pytestmark = pytest.mark.timeout(120)  # a checkpoint answers real pictures twice


@pytest.mark.shared
def test_bfloat16_gives_float32s_top_1_wherever_the_margin_is_above_two_percent(shared: Path) -> None:
    checkpoint = load_checkpoint(str(shared / "weights" / "deit_tiny_imagenet"))
    files = sorted((shared / "data" / "imagenet-samples").glob("*.JPEG"))
    images = np.stack([preprocess(file.read_bytes(), checkpoint.preprocess) for file in files])
    mean = torch.tensor(checkpoint.preprocess.mean).reshape(1, 3, 1, 1)
    std = torch.tensor(checkpoint.preprocess.std).reshape(1, 3, 1, 1)
    pixels = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - mean) / std
    model = checkpoint.build()
    with torch.inference_mode():
        full = model(pixels).logits.softmax(-1)
        half = model.to(torch.bfloat16)(pixels.bfloat16()).logits.float().softmax(-1)
    top = full.topk(2).values
    clear = top[:, 0] - top[:, 1] > 0.02
    same = full.argmax(-1) == half.argmax(-1)
    largest = float((full - half).abs().max())
    print(f"bfloat16: top-1 equal on {int(same.sum())} of {len(files)}, largest difference {largest:.4f}")  # noqa: T201
    assert int(clear.sum()) > 40
    assert same[clear].all()
    assert largest < 0.05
