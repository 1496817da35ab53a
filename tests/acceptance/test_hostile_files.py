"""Send pictures that have broken image software, and pictures of real cameras, over HTTP."""

import csv
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from model.images.formats import SUPPORTED_FORMATS
from tests.e2e.checkpoints import write_checkpoint
from tests.launcher import ServerProcess

pytestmark = pytest.mark.timeout(240)  # servers, checkpoints and many pictures

MAX_SECONDS = 2.0
"""Seconds of processor time for one file."""

MAX_BYTES = 500 << 20

OK = 200
TOO_LARGE = 413
UNSUPPORTED = 415
INVALID = 422
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
    "accept if AVIF supported, else clean 415": {OK}
    if "AVIF" in SUPPORTED_FORMATS
    else {UNSUPPORTED},
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serve a tiny model with an input of usual size: decoding takes the time."""
    folder = tmp_path_factory.mktemp("server")
    labels = tuple("abcdefghij")
    checkpoint = write_checkpoint(folder, "tiny", (224, 224), labels, seed=7, patch_size=32)
    with ServerProcess(
        folder / "log", checkpoint=checkpoint, device="cpu", compile="off"
    ) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.slow
def test_hostile_files_get_allowed_answers(
    server: ServerProcess, client: httpx.Client, shared: Path
) -> None:
    folder = shared / "data" / "torture"
    with (folder / "MANIFEST.csv").open(encoding="utf-8") as manifest:
        rows = list(csv.DictReader(manifest))
    assert len(rows) > 300

    def ask(data: bytes) -> tuple[int, float]:
        started = server.cpu_seconds()  # unaffected by other programs on the machine
        response = client.post("/classify", files={"file": ("picture", data)})
        assert response.headers["content-type"] == (
            "application/json" if response.status_code == 200 else "application/problem+json"
        )
        return response.status_code, server.cpu_seconds() - started

    good = (shared / "data" / "torture" / rows[0]["file"]).read_bytes()
    ask(good)
    server.reset_peak()
    before = server.resident_bytes()
    wrong = []
    slow = []
    for row in rows:
        data = (folder / row["file"]).read_bytes()
        status, seconds = ask(data)
        for _ in range(2):  # background work after the start does not count
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
