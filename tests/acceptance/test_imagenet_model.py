"""DeiT-Tiny from its hub folder, served: real photographs get their labels, and the numbers are timm's."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint
from model.images.preprocess import preprocess
from tests.launcher import ServerProcess
from tests.timm_reference import timm
from vitserve.client import Client

pytestmark = pytest.mark.timeout(240)  # servers, checkpoints and many pictures

CLASSES = 1000


@dataclass(frozen=True)
class Sample:
    name: str
    data: bytes
    class_index: int


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return shared / "weights" / "deit_tiny_imagenet"


@pytest.fixture(scope="module")
def samples(shared: Path) -> list[Sample]:
    pictures = shared / "data" / "imagenet-samples"
    with (pictures / "LABELS.csv").open(encoding="utf-8") as labels:
        return [
            Sample(row["file"], (pictures / row["file"]).read_bytes(), int(row["class_index"]))
            for row in csv.DictReader(labels)
        ]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(log, checkpoint=folder, device="cpu", dtype="float32") as process:
        yield process


@pytest.fixture(scope="module")
def served(server: ServerProcess, samples: list[Sample]) -> NDArray[np.float32]:
    """Scores of every sample over HTTP: float32 [samples, classes]."""

    def ask(sample: Sample) -> NDArray[np.float32]:
        scores = np.zeros(CLASSES, np.float32)
        for found in client.classify(sample.data, top_k=CLASSES).predictions:
            scores[found.index] = found.score
        return scores

    with Client(server.url, timeout=60) as client, ThreadPoolExecutor(8) as pool:
        return np.stack(list(pool.map(ask, samples)))


@pytest.fixture(scope="module")
def pixels(folder: Path, samples: list[Sample]) -> NDArray[np.uint8]:
    config = load_checkpoint(str(folder)).preprocess
    return np.stack([preprocess(sample.data, config) for sample in samples])


@pytest.fixture(scope="module")
def timm_logits(folder: Path, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """timm's own model with the same weights on the same pixels, in float32."""
    model = timm().create_model("deit_tiny_patch16_224", pretrained=False).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    mean = torch.tensor(model.pretrained_cfg["mean"]).reshape(1, 3, 1, 1)
    std = torch.tensor(model.pretrained_cfg["std"]).reshape(1, 3, 1, 1)
    batch = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    with torch.inference_mode():
        logits: NDArray[np.float32] = model((batch - mean) / std).numpy()
    return logits


@pytest.mark.slow
def test_real_photographs_get_their_labels_over_http(served: NDArray[np.float32], samples: list[Sample]) -> None:
    right = [scores.argmax() == sample.class_index for scores, sample in zip(served, samples, strict=True)]
    assert len(right) == 50
    assert sum(right) >= 39


@pytest.mark.slow
def test_the_scores_over_http_are_timms(served: NDArray[np.float32], timm_logits: NDArray[np.float32]) -> None:
    expected = torch.from_numpy(timm_logits).softmax(dim=-1).numpy()
    np.testing.assert_allclose(served, expected, rtol=0, atol=1e-4)
