"""Compare a served bundled checkpoint with its offline evaluation, and DeiT-Tiny with timm.

The images are CIFAR-10's, also enlarged, compressed and turned, as users send them.
"""

import csv
import io
import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from model.checkpoint import BUNDLED, load_checkpoint
from model.extensions.datasets.pictures import Images, PictureFiles
from model.extensions.evaluation import cifar10
from model.extensions.evaluation.datasets import open_evaluation_set
from model.extensions.evaluation.evaluate import measure
from model.images.preprocess import preprocess
from model.runtime.predictor import Predictor
from tests.extensions.evaluation.scores import predict_scores
from tests.launcher import ServerProcess
from tests.model.images.pictures import encode
from tests.timm_reference import timm
from vitserve.client import Client
from vitserve.documents import Classification

pytestmark = pytest.mark.timeout(400)  # servers, checkpoints and many pictures

COUNT = 500
SERVED = 200
"""Number of images that are sent to a server."""
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
    predictor = Predictor(
        load_checkpoint("bundled"), device="cpu", compile_mode="off", dtype="float32"
    )
    return predict_scores(predictor, images.pixels)


def served_scores(server: ServerProcess, images: Images) -> NDArray[np.float32]:
    def ask(content: bytes) -> bytes:
        headers = {"Content-Type": "image/png"}
        return client.post(
            "/classify", params={"top_k": cifar10.CLASSES}, content=content, headers=headers
        ).content

    # Encoded before the requests and parsed after them, so that the clients keep the server busy.
    uploads = [
        encode(Image.fromarray(each), "PNG")
        for each in images.pixels[:SERVED].transpose(0, 2, 3, 1)
    ]
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):
        answers = list(pool.map(ask, uploads))
    scores = np.zeros((len(answers), cifar10.CLASSES), np.float32)
    for row, answer in enumerate(answers):
        for found in Classification.model_validate_json(answer).predictions:
            scores[row, found.index] = found.score
    return scores


@pytest.mark.slow
def test_default_dtype_keeps_clear_answers(
    images: Images, offline: NDArray[np.float32], tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "log", warm=True) as server:
        served = served_scores(server, images)
        metrics = server.metrics()
        assert server.terminate() == 0
    offline = offline[:SERVED]
    ordered = np.sort(offline, axis=1)
    clear = (
        ordered[:, -1] - ordered[:, -2] > 0.1
    )  # bfloat16 moves logits by up to 0.2, in torch and in OpenVINO
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(served.argmax(axis=1)[clear], offline.argmax(axis=1)[clear])

    sizes = {name: value for name, value in metrics.items() if name.startswith("vit_batch_size_")}
    [images_launched] = [
        value for name, value in sizes.items() if name.startswith("vit_batch_size_sum")
    ]
    [batches] = [value for name, value in sizes.items() if name.startswith("vit_batch_size_count")]
    assert images_launched == metrics['vit_images_total{model="vit-cifar10"}'] == SERVED
    assert images_launched / batches > 4


def test_the_model_card_tells_the_accuracy(images: Images, offline: NDArray[np.float32]) -> None:
    found = re.search(
        r"Test accuracy \(top-1\) \| \*\*([\d.]+)%", (BUNDLED / "MODEL_CARD.md").read_text()
    )
    assert found is not None
    told = float(found[1]) / 100
    measured = measure(offline, images.labels, load_checkpoint("bundled").labels).accuracy
    # A tolerance of three standard errors of a share, because a part of the images represents all.
    assert measured == pytest.approx(told, abs=3 * (told * (1 - told) / COUNT) ** 0.5)
    assert told >= 0.65


SENT = 250
SIDE = 256
"""Side of the sent pictures in pixels."""
STORED_AS = {
    3: Image.Transpose.ROTATE_180,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}
"""Pictures as a camera stores them, by Exif orientation (6: viewers turn it clockwise by 90°)."""
PROMISED = 0.015
"""Largest loss of accuracy from enlarging, compressing and turning, on all test images."""


@pytest.fixture(scope="module")
def pictures(shared: Path) -> PictureFiles:
    return open_evaluation_set(shared / "data" / "cifar-10-batches-bin").files.take(np.arange(SENT))


def as_sent(files: PictureFiles, *, turned: bool) -> PictureFiles:
    """Return upright pictures as users send them; if `turned`, stored by Exif 3, 6 and 8."""

    def read(number: int) -> bytes:
        picture = Image.open(io.BytesIO(files.read(number))).convert("RGB")
        picture = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        orientation = tuple(STORED_AS)[number % len(STORED_AS)] if turned else None
        stored = picture.transpose(STORED_AS[orientation]) if orientation else picture
        return encode(stored, "JPEG", orientation, quality=85)

    return replace(files, read=read)


@pytest.fixture(scope="module")
def answers(pictures: PictureFiles, offline: NDArray[np.float32]) -> dict[str, NDArray[np.int64]]:
    """Return the predicted class of each picture, by the form in which it is sent."""
    predictor = Predictor(
        load_checkpoint("bundled"), device="cpu", dtype="float32", compile_mode="off"
    )
    scores = {"as stored": offline[:SENT]}
    scores |= {
        name: predict_scores(predictor, as_sent(pictures, turned=name == "turned"))
        for name in ("JPEG", "turned")
    }
    return {name: found.argmax(axis=1) for name, found in scores.items()}


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["JPEG", "turned"])
def test_picture_variants_keep_their_answer(
    variant: str, answers: dict[str, NDArray[np.int64]], pictures: PictureFiles
) -> None:
    truth = pictures.labels
    right = answers["as stored"] == truth
    right_as_sent = answers[variant] == truth
    lost = right.mean() - right_as_sent.mean()
    # A part of the images represents all ten thousand. Only images with a changed answer move the
    # difference, each by one. The tolerance adds two standard errors of such a sum to the promised
    # loss.
    changed = (right != right_as_sent).sum()
    assert lost < PROMISED + 2 * changed**0.5 / SENT
    assert changed < 0.1 * SENT


@pytest.mark.shared
@pytest.mark.slow
def test_exif_turns_change_almost_no_answer(answers: dict[str, NDArray[np.int64]]) -> None:
    # The same pixels, compressed in another direction.
    assert (answers["turned"] == answers["JPEG"]).mean() > 0.98


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
    """Return every second photograph, which are of as many classes."""
    pictures = shared / "data" / "imagenet-samples"
    with (pictures / "LABELS.csv").open(encoding="utf-8") as labels:
        return [
            Sample(row["file"], (pictures / row["file"]).read_bytes(), int(row["class_index"]))
            for row in itertools.islice(csv.DictReader(labels), 0, None, 2)
        ]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(
        log, warm=True, checkpoint=folder, device="cpu", dtype="float32", request_timeout=60
    ) as process:
        yield process


@pytest.fixture(scope="module")
def served(server: ServerProcess, samples: list[Sample]) -> NDArray[np.float32]:
    """Return the scores of every sample over HTTP: float32 [samples, classes]."""

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
    """Return logits of timm's model with these weights, in float32, for every fifth sample."""
    pixels = pixels[::5]
    model = timm().create_model("deit_tiny_patch16_224", pretrained=False).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    mean = torch.tensor(model.pretrained_cfg["mean"]).reshape(1, 3, 1, 1)
    std = torch.tensor(model.pretrained_cfg["std"]).reshape(1, 3, 1, 1)
    batch = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    with torch.inference_mode():
        logits: NDArray[np.float32] = model((batch - mean) / std).numpy()
    return logits


@pytest.mark.slow
def test_real_photographs_get_their_labels(
    served: NDArray[np.float32], samples: list[Sample]
) -> None:
    right = [
        scores.argmax() == sample.class_index
        for scores, sample in zip(served, samples, strict=True)
    ]
    assert len(right) == 25
    assert sum(right) >= 19


@pytest.mark.slow
def test_the_scores_over_http_are_timms(
    served: NDArray[np.float32], timm_logits: NDArray[np.float32]
) -> None:
    expected = torch.from_numpy(timm_logits).softmax(dim=-1).numpy()
    np.testing.assert_allclose(served[::5], expected, rtol=0, atol=1e-4)
