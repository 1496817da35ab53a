"""Shared by tests of a running service: the server with a client, pictures, raw sockets."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from model.checkpoint import Checkpoint, load_checkpoint
from model.images.preprocess import preprocess
from model.outputs import RequestedOutputs
from model.runtime.predictor import Predictor
from tests.launcher import PATIENCE, ServerProcess
from tests.model.images.pictures import encode
from tests.problems import code_of

SIZE = 16
CHECKPOINT_NAME = "tiny"
LABELS = tuple(f"label {i}" for i in range(10))

Serve = Callable[..., "Served"]
"""Type of the fixtures `serve` and `serve_module`, which start a server; keywords are settings."""


class Served:
    """A server process and its client."""

    def __init__(
        self, log: Path, *, wait: bool = True, warm: bool = False, **settings: object
    ) -> None:
        self.process = ServerProcess(log, wait=wait, warm=warm, **settings)
        if wait:
            self.connect(self.process.url)

    def connect(self, url: str) -> None:
        """Send further requests to `url`."""
        self.url = url
        self.host = "127.0.0.1"
        self.port = int(url.rpartition(":")[2])
        self.client = client(url)

    def kill(self) -> None:
        """End the server in any state."""
        with self.process:
            if hasattr(self, "client"):
                self.client.close()

    @property
    def log(self) -> str:
        return self.process.log

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def classify(self, picture: bytes, query: str = "", **options: Any) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"} | options.pop("headers", {})
        return self.client.post(f"/classify?{query}", content=picture, headers=headers, **options)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels; 0 without such samples."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @contextmanager
    def raw(self, source: str = "") -> Iterator[Raw]:
        """Connect from an address of this machine; the service tells clients apart by address."""
        with Raw(self.host, self.port, source) as connection:
            yield connection

    def idle(self) -> bool:
        """Return whether the service handles no request."""
        return self.metric("vit_inflight_requests") == 0 and self.metric("vit_queue_depth") == 0


def client(url: str, **options: Any) -> httpx.Client:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # Reading the system's certificates would take longer than the requests.
    return httpx.Client(
        base_url=url, timeout=PATIENCE, limits=limits, trust_env=False, verify=False, **options
    )


class Raw:
    """A socket that sends raw bytes."""

    def __init__(self, host: str, port: int, source: str = "") -> None:
        self.socket = socket.create_connection(
            (host, port), timeout=PATIENCE, source_address=(source, 0) if source else None
        )
        self.buffer = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(
        self, body: bytes, *, path: str = "/classify", sent: int | None = None, headers: str = ""
    ) -> None:
        """Send a request with the first `sent` bytes of its body."""
        lines = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n"
        )
        self.send(lines.encode() + body[:sent])

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return (status, headers, body) of the next answer."""
        while b"\r\n\r\n" not in self.buffer:
            self._receive()
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        length = int(headers.get("content-length", 0))
        while len(self.buffer) < length:
            self._receive()
        body = self.buffer[:length]
        self.buffer = self.buffer[length:]
        return int(lines[0].split()[1]), headers, body

    def problem(self) -> tuple[int, str]:
        """Return (status, code) of the next answer, which must be a problem document."""
        status, headers, body = self.answer()
        return status, code_of(status, headers, body)

    def is_closed(self) -> bool:
        """Return whether the server closes without a further byte."""
        try:
            return self.buffer == b"" and self.socket.recv(1000) == b""
        except ConnectionResetError:
            return True

    def _receive(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, f"closed after {self.buffer!r}"
        self.buffer += data


def problem(response: httpx.Response) -> tuple[int, str]:
    """Return (status, code) of a response."""
    return response.status_code, code_of(response.status_code, response.headers, response.content)


def predictor_of(folder: Path) -> Predictor:
    """Load the model of a folder, without a service."""
    return Predictor(
        load_checkpoint(str(folder)), device="cpu", compile_mode="off", dtype="float32", threads=1
    )


def scores_alone(predictor: Predictor, file: bytes) -> NDArray[np.float32]:
    """Return the scores of a picture alone in its batch: float32 [classes] in index order."""
    pixels = preprocess(file, predictor.checkpoint.preprocess)
    [outputs] = predictor.predict(
        pixels[np.newaxis], RequestedOutputs(predictor.config.num_classes)
    )
    vector = np.zeros(predictor.config.num_classes, np.float32)
    vector[outputs.indices] = outputs.scores
    return vector


@dataclass(frozen=True)
class Pictures:
    """PNG files and the scores that the model gives each of them alone.

    Attributes:
        files: PNG.
        scores: float32 [files, classes], in index order.
    """

    files: list[bytes]
    scores: NDArray[np.float32]

    @classmethod
    def make(cls, predictor: Predictor, *, count: int, side: int = SIZE) -> Pictures:
        """Return `count` pictures of many sizes, with clearly different scores and best classes."""
        generator = np.random.default_rng(1)
        files: list[bytes] = []
        vectors: list[NDArray[np.float32]] = []
        for attempt in range(4 * count):
            patches = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            size = side + attempt % 7, side + attempt % 5
            file = encode(patches.resize(size, Image.Resampling.BILINEAR), "PNG")
            vector = scores_alone(predictor, file)
            second, best = np.sort(vector)[-2:]
            if best - second > 2e-3 and all(
                np.abs(vector - other).max() > 0.01 for other in vectors
            ):
                files.append(file)
                vectors.append(vector)
            if len(files) == count:
                return cls(files, np.stack(vectors))
        raise AssertionError(f"only {len(files)} pictures that the model tells apart")

    def __len__(self) -> int:
        return len(self.files)

    def check(self, index: int, document: dict[str, Any], tolerance: float = 1e-3) -> None:
        """Check that an answer is this picture's: each named class has the picture's score."""
        found = {p["index"]: p["score"] for p in document["predictions"]}
        for class_index, score in found.items():
            assert abs(score - self.scores[index, class_index]) < tolerance, (
                f"picture {index} got another's answer"
            )
        best = int(self.scores[index].argmax())
        assert document["predictions"][0]["index"] == best


class Models:
    """The scores of several models for each picture alone."""

    def __init__(self, files: list[bytes], folders: Iterable[Path]) -> None:
        self.files = files
        self._known: dict[str, tuple[Pictures, Checkpoint]] = {}
        for folder in folders:
            predictor = predictor_of(folder)
            scores = np.stack([scores_alone(predictor, file) for file in files])
            self._known[folder.name] = Pictures(files, scores), load_checkpoint(str(folder))

    def check(self, index: int, document: dict[str, Any]) -> str:
        """Return the name of the only model that explains an answer."""
        name: str = document["model"]
        pictures, checkpoint = self._known[name]
        pictures.check(index, document, 1e-4)
        assert all(
            found["label"] == checkpoint.labels[found["index"]] for found in document["predictions"]
        )
        assert "attention" not in document or document["attention"]["grid"] == list(
            checkpoint.vit.grid
        )
        return name


INFERRED = ("score", "index", "label", "logits", "attention")
"""Outputs of the Open Inference Protocol that `check_inferred` reads."""


def check_inferred(answer: Any, server: Served, files: list[bytes]) -> None:
    """Check that a Triton client's answer (`top_k` 3, `attention` cls) equals that of /classify."""
    score, index, label, logits, maps = (answer.as_numpy(name) for name in INFERRED)
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.take_along_axis(scores, index, axis=1), score, rtol=1e-4)
    for position, file in enumerate(files):
        expected = server.classify(file, "top_k=3&attention=true").json()
        predictions = expected["predictions"]
        assert index[position].tolist() == [each["index"] for each in predictions]
        texts = [text.decode() if isinstance(text, bytes) else text for text in label[position]]
        assert texts == [each["label"] for each in predictions]
        # A batch of another size sums in another order.
        np.testing.assert_allclose(
            score[position], [each["score"] for each in predictions], rtol=0.02
        )
        np.testing.assert_allclose(
            maps[position], expected["attention"]["values"], rtol=0.05, atol=1e-4
        )


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return `work(0)` ... `work(count - 1)` in order, each computed on its own thread."""
    with ThreadPoolExecutor(count) as pool:
        futures: list[Future[Any]] = [pool.submit(work, i) for i in range(count)]
        return [future.result(PATIENCE) for future in futures]


LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) +\S")
"""The beginning of every line of a text log."""
