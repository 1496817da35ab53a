"""Pictures that have broken image software before, and pictures from real cameras, over HTTP."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from model.images.formats import SUPPORTED_FORMATS
from tests.launcher import ServerProcess

pytestmark = pytest.mark.timeout(240)  # servers, checkpoints and many pictures

SIDE = 32
"""Pixels at which pictures are compared: no more than any model here sees."""

MAX_SECONDS = 2.0
"""Of processor time, for one file."""

MAX_BYTES = 500 << 20

OK, TOO_LARGE, UNSUPPORTED, INVALID = 200, 413, 415, 422
REFUSED = {TOO_LARGE, UNSUPPORTED, INVALID}
ANY = REFUSED | {OK}
ALLOWED = {
    "accept": {OK},
    "accept (first frame)": {OK},
    "accept (ignore ICC)": {OK},
    "accept (ignore metadata)": {OK},
    "accept (reference)": {OK},
    "accept default image": {OK},
    "accept (lenient) or reject": ANY,
    "accept (icc-after-SOF/app13 are header-only: may reject)": ANY,
    "accept (invalid_palette_index: either)": ANY,
    "accept if AVIF supported, else clean 415": {OK} if "AVIF" in SUPPORTED_FORMATS else {UNSUPPORTED},
    "accept if supported, else clean 415": {OK, UNSUPPORTED},
    "no crash, bounded time": ANY,
    "no crash, bounded time; accept or reject": ANY,
    "no crash; reject/415": ANY if "HEIF" in SUPPORTED_FORMATS else REFUSED,
    "reject": REFUSED,
    "reject (truncated_end_chunk may be accepted)": ANY,
    "reject by pixel limit": {TOO_LARGE},
    "reject cleanly (or accept)": ANY,
    "reject or ignore text, bounded memory": ANY,
    "-": {UNSUPPORTED},  # the text file that comes with a suite
}
"""Statuses that each `expect` of the manifest allows."""


@pytest.fixture(scope="module")
def server(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(log, checkpoint=shared / "weights" / "deit_tiny_imagenet", device="cpu") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def seen(client: httpx.Client, data: bytes) -> NDArray[np.float64]:
    """What the model saw of a picture: a heat map that covers nothing."""
    response = client.post(
        f"/attention?alpha=0&size={SIDE}", content=data, headers={"Content-Type": "application/octet-stream"}
    )
    assert response.status_code == 200, response.text
    return np.asarray(Image.open(io.BytesIO(response.content)), np.float64)


def likeness(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Correlation of two pictures."""
    return float(np.corrcoef(left.ravel(), right.ravel())[0, 1])


def assert_upright(picture: NDArray[np.float64], expected: NDArray[np.float64], name: str) -> None:
    same = likeness(picture, expected)
    assert same > 0.9, name
    turned = [np.rot90(expected, times) for times in (1, 2, 3)] + [expected[:, ::-1], expected[::-1]]
    assert same > max(likeness(picture, wrong) for wrong in turned) + 0.03, name


@pytest.mark.slow
def test_every_file_is_answered_as_its_manifest_allows_soon_and_in_little_memory(
    server: ServerProcess, client: httpx.Client, shared: Path
) -> None:
    folder = shared / "data" / "torture"
    with (folder / "MANIFEST.csv").open(encoding="utf-8") as manifest:
        rows = list(csv.DictReader(manifest))
    assert len(rows) > 300

    def ask(data: bytes) -> tuple[int, float]:
        started = server.cpu_seconds()  # which other programs on the machine do not change
        response = client.post("/classify", files={"file": ("picture", data)})
        assert response.headers["content-type"] == (
            "application/json" if response.status_code == 200 else "application/problem+json"
        )
        return response.status_code, server.cpu_seconds() - started

    good = (shared / "data" / "torture" / rows[0]["file"]).read_bytes()
    ask(good)
    server.reset_peak()
    before = server.resident_bytes()
    wrong, slow = [], []
    for row in rows:
        data = (folder / row["file"]).read_bytes()
        status, seconds = ask(data)
        for _ in range(2):  # what the process does beside it, after its start, is not the file's fault
            if seconds > MAX_SECONDS:
                seconds = min(seconds, ask(data)[1])
        if status not in ALLOWED[row["expect"]]:
            wrong.append((row["file"], row["expect"], status))
        if seconds > MAX_SECONDS:
            slow.append((row["file"], seconds))
    assert wrong == []
    assert slow == []
    assert server.peak_bytes() - before < MAX_BYTES
    assert ask(good)[0] == 200
    assert client.get("/readyz").status_code == 200
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_photographs_are_seen_upright(client: httpx.Client, shared: Path) -> None:
    files = sorted((shared / "data" / "photos").glob("*.jpg"))
    assert len(files) >= 5
    preprocessing = client.get("/model").json()["preprocessing"]
    assert preprocessing["resize"] == "shortest_edge"
    for file in files:
        upright = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
        kept = preprocessing["size"][0] / preprocessing["resize_size"][0]
        side = round(kept * min(upright.size))
        left, top = (upright.width - side) / 2, (upright.height - side) / 2
        expected = upright.resize((SIDE, SIDE), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
        assert_upright(seen(client, file.read_bytes()), np.asarray(expected, np.float64), file.name)
        response = client.post("/classify", files={"file": (file.name, file.read_bytes())})
        assert response.status_code == 200
