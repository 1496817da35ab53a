"""The bundled checkpoint, served, against its offline evaluation on real CIFAR-10 images."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model.checkpoint import BUNDLED, load_checkpoint
from model.data import cifar10
from model.data.pictures import Images
from model.evaluation.evaluate import measure
from model.runtime.predictor import Predictor
from tests.launcher import ServerProcess
from tests.model.evaluation.scores import predict_scores
from tests.model.images.pictures import encode
from vitserve.documents import Classification

pytestmark = pytest.mark.timeout(240)  # servers, checkpoints and many pictures

COUNT = 1000
SERVED = 400
"""The first of them, which are sent to a server."""
CONCURRENCY = 32


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    return shared / "data" / "cifar-10-batches-bin"


@pytest.fixture(scope="module")
def images(data: Path) -> Images:
    test = cifar10.read(data, cifar10.TEST_FILES)
    return Images(test.pixels[:COUNT], test.labels[:COUNT])


@pytest.fixture(scope="module")
def offline(images: Images) -> NDArray[np.float32]:
    predictor = Predictor(load_checkpoint("bundled"), device="cpu", compile_mode="off", dtype="float32")
    return predict_scores(predictor, images.pixels)


def served_scores(server: ServerProcess, images: Images) -> NDArray[np.float32]:
    def ask(content: bytes) -> bytes:
        headers = {"Content-Type": "image/png"}
        return client.post("/classify", params={"top_k": cifar10.CLASSES}, content=content, headers=headers).content

    # Encoded before and parsed after, so that the clients keep the server busy.
    uploads = [encode(Image.fromarray(each), "PNG") for each in images.pixels[:SERVED].transpose(0, 2, 3, 1)]
    with httpx.Client(base_url=server.url, timeout=60) as client, ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(ask, uploads))
    scores = np.zeros((len(answers), cifar10.CLASSES), np.float32)
    for row, answer in enumerate(answers):
        for found in Classification.model_validate_json(answer).predictions:
            scores[row, found.index] = found.score
    return scores


@pytest.mark.slow
def test_the_default_dtype_agrees_wherever_the_margin_is_clear_and_images_share_batches(
    images: Images, offline: NDArray[np.float32], tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "log") as server:
        served = served_scores(server, images)
        metrics = server.metrics()
        assert server.terminate() == 0
    offline = offline[:SERVED]
    ordered = np.sort(offline, axis=1)
    clear = ordered[:, -1] - ordered[:, -2] > 0.1  # bfloat16 moves logits by up to 0.2 here, in torch as in OpenVINO
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(served.argmax(axis=1)[clear], offline.argmax(axis=1)[clear])

    sizes = {name: value for name, value in metrics.items() if name.startswith("vit_batch_size_")}
    [images_launched] = [value for name, value in sizes.items() if name.startswith("vit_batch_size_sum")]
    [batches] = [value for name, value in sizes.items() if name.startswith("vit_batch_size_count")]
    assert images_launched == metrics['vit_images_total{model="vit-cifar10"}'] == SERVED
    assert images_launched / batches > 4


def test_the_model_card_tells_the_accuracy(images: Images, offline: NDArray[np.float32]) -> None:
    found = re.search(r"Test accuracy \(top-1\) \| \*\*([\d.]+)%", (BUNDLED / "MODEL_CARD.md").read_text())
    assert found is not None
    told = float(found[1]) / 100
    measured = measure(offline, images.labels, load_checkpoint("bundled").labels).accuracy
    # The first thousand images stand for all ten thousand: three standard errors of a share.
    assert measured == pytest.approx(told, abs=3 * (told * (1 - told) / COUNT) ** 0.5)
    assert told >= 0.65
