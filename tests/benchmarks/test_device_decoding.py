"""What the benchmark of decoding on the device tells, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import device_decoding
from tests.model.runtime.cuda.test_picture_decoding import photograph


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in range(3):
        (tmp_path / f"{seed}.jpg").write_bytes(photograph((60, 45), orientation=1 + seed, seed=seed))
    Image.new("RGB", (40, 40)).save(tmp_path / "4.png")
    return tmp_path


def test_rate_differences_and_classes_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert device_decoding.main([str(folder), "--device", "cpu", "--batch", "2", "--seconds", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pictures"], found["unsuited"], found["failed"]) == (4, 1, 0)
    assert found["images_per_second"] > 0
    assert found["from_cpu_full_size"]["largest_levels"] <= 1
    assert found["from_cpu_full_size"]["equal_top1"] == 1


def test_a_folder_without_such_pictures_and_a_missing_gpu_are_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available():
        assert device_decoding.main([str(folder)]) == 2
        assert "device 'cuda:0'" in (told := capsys.readouterr().err)
        assert told.count("\n") == 1
    for file in folder.glob("*.jpg"):
        file.unlink()
    assert device_decoding.main([str(folder), "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert told == "benchmarks/device_decoding.py: none of 1 pictures is one that a device decodes\n"
