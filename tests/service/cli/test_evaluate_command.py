"""`vitserve evaluate`, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.service.cli.command_line import run, write_checkpoint

pytestmark = pytest.mark.timeout(90)  # checkpoints are loaded, and answer

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", LABELS, image_size=(32, 32), patch_size=16, depth=1)


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar"
    folder.mkdir()
    generator = np.random.default_rng(0)
    colours = generator.integers(0, 256, (60, 3, 1))
    labels = generator.integers(0, 10, (60, 1))
    pixels = np.broadcast_to(colours, (60, 3, 1024)).reshape(60, -1)
    np.concatenate([labels, pixels], axis=1).astype(np.uint8).tofile(folder / "test_batch.bin")
    (folder / "batches.meta.txt").write_text("\n".join(LABELS))
    return folder


def test_a_folder_of_pictures_is_measured_as_the_service_would_see_them(
    checkpoint: Path, cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = np.fromfile(cifar / "test_batch.bin", dtype=np.uint8).reshape(60, -1)
    for number, record in enumerate(records):
        path = tmp_path / "folder" / "test" / LABELS[record[0]] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(record[1:].reshape(3, 32, 32).transpose(1, 2, 0)).save(path)
        (tmp_path / "folder" / "train" / LABELS[record[0]]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "folder" / "train" / LABELS[record[0]] / "0.png")
    flags = ["--checkpoint", checkpoint, "--dtype", "float32", "--device", "cpu"]
    _, by_file, _ = run(capsys, "evaluate", "--data", tmp_path / "folder", *flags)
    _, by_array, _ = run(capsys, "evaluate", "--data", cifar, *flags)
    assert by_file == by_array
    assert "of 60 test images right" in by_file
