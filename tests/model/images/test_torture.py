"""Files that have broken image software before: each is answered as its manifest allows, soon and in little memory."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.images.formats import SUPPORTED_FORMATS
from model.images.preprocess import preprocess
from tests.model.images.pictures import config

pytestmark = [pytest.mark.shared, pytest.mark.timeout(180)]  # all files are decoded four times

MAX_SECONDS = 2
MAX_MEGABYTES = 500

RUN = """
import csv, json, pathlib, re, sys, time
from model.config import PreprocessConfig
from model.errors import ImageError
from model.images.preprocess import preprocess

def config(side, resize_to):
    return PreprocessConfig(size=(side, side), resize="shortest_edge", resize_size=(resize_to, resize_to),
                            interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3)

folder = pathlib.Path(sys.argv[1])
for row in csv.DictReader(open(folder / "MANIFEST.csv", encoding="utf-8")):
    data = (folder / row["file"]).read_bytes()
    for wanted in (config(32, 32), config(224, 248)):
        for scaled_decode in (False, True):
            start = time.process_time()
            try:
                preprocess(data, wanted, scaled_decode=scaled_decode)
                answer = "ok"
            except ImageError as error:
                answer = type(error).__name__
            seconds = time.process_time() - start
            # Not getrusage: its peak begins with that of the process that started this one.
            peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) / 1e3
            print(json.dumps([row["file"], answer, seconds, peak]), flush=True)
"""


@dataclass(frozen=True)
class Answers:
    """What became of one file, decoded at two sizes, scaled and not."""

    file: str
    expect: str
    answers: frozenset[str]
    seconds: float
    megabytes: float


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    path = shared / "data" / "torture"
    if not path.is_dir():
        pytest.skip(f"no torture files: {path} does not exist")
    return path


@pytest.fixture(scope="module")
def answered(folder: Path) -> list[Answers]:
    # A process of its own, so that its peak is the pictures' and a crash is an answer that is missing.
    done = subprocess.run([sys.executable, "-c", RUN, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-200:]
    runs: dict[str, list[list[Any]]] = {}
    for line in done.stdout.splitlines():
        runs.setdefault(json.loads(line)[0], []).append(json.loads(line))
    with (folder / "MANIFEST.csv").open(encoding="utf-8") as manifest:
        return [
            Answers(
                row["file"],
                row["expect"],
                frozenset(run[1] for run in runs[row["file"]]),
                max(run[2] for run in runs[row["file"]]),
                max(run[3] for run in runs[row["file"]]),
            )
            for row in csv.DictReader(manifest)
        ]


OK, INVALID, UNSUPPORTED, TOO_LARGE = "ok", "InvalidImage", "UnsupportedImageFormat", "ImageTooLarge"
ANY = {OK, INVALID, UNSUPPORTED, TOO_LARGE}
ALLOWED = {
    "accept": {OK},
    "accept (first frame)": {OK},
    "accept (ignore ICC)": {OK},
    "accept (ignore metadata)": {OK},
    "accept (reference)": {OK},
    "accept default image": {OK},
    "accept (lenient) or reject": {OK, INVALID},
    "accept (icc-after-SOF/app13 are header-only: may reject)": {OK, INVALID},
    "accept (invalid_palette_index: either)": {OK, INVALID},
    "accept if AVIF supported, else clean 415": {OK} if "AVIF" in SUPPORTED_FORMATS else {UNSUPPORTED},
    "accept if supported, else clean 415": {OK, UNSUPPORTED},
    "no crash, bounded time": ANY,
    "no crash, bounded time; accept or reject": ANY,
    "no crash; reject/415": ANY if "HEIF" in SUPPORTED_FORMATS else ANY - {OK},
    "reject": {INVALID},
    "reject (truncated_end_chunk may be accepted)": {INVALID, OK},
    "reject by pixel limit": {TOO_LARGE},
    "reject cleanly (or accept)": {INVALID, OK},
    "reject or ignore text, bounded memory": {INVALID, OK},
    "-": {UNSUPPORTED},  # the text file that comes with a suite
}
"""What each `expect` of the manifest allows."""


def test_every_file_is_answered_as_its_manifest_allows(answered):
    assert len(answered) > 300
    wrong = [(each.file, each.expect, *each.answers) for each in answered if not each.answers <= ALLOWED[each.expect]]
    assert wrong == []


def test_a_file_has_one_answer_whatever_the_model(answered):
    assert [(each.file, *each.answers) for each in answered if len(each.answers) > 1] == []


def test_no_file_takes_long(answered):
    assert [(each.file, each.seconds) for each in answered if each.seconds > MAX_SECONDS] == []


def test_no_file_takes_much_memory(answered):
    assert max(each.megabytes for each in answered) < MAX_MEGABYTES


def likeness(left: np.ndarray, right: np.ndarray) -> float:
    """Correlation of two pictures, which were compressed apart from one another."""
    return float(np.corrcoef(left.ravel().astype(float), right.ravel().astype(float))[0, 1])


@pytest.mark.parametrize("scene", ["Landscape", "Portrait", "hopper"])
@pytest.mark.parametrize("scaled_decode", [True, False])
def test_every_orientation_of_a_scene_comes_out_upright(folder, scene, scaled_decode):
    files = sorted((folder / "exif-orientation").glob(f"{scene}_*"))
    pictures = [preprocess(file.read_bytes(), config((64, 64)), scaled_decode=scaled_decode) for file in files]
    assert len(files) > 2

    turned = [np.rot90(pictures[0], times) for times in (1, 2, 3)] + [pictures[0][:, ::-1], pictures[0][::-1]]
    for file, picture in zip(files, pictures, strict=True):
        same = likeness(picture, pictures[0])
        assert same > 0.95, file.name
        assert all(same > likeness(picture, wrong) + 0.05 for wrong in turned), file.name


def test_rotated_avif_files_come_out_upright(folder):
    pictures = [
        preprocess((folder / "avif" / f"rot{number}mir0.avif").read_bytes(), config((64, 64))) for number in range(4)
    ]

    for number, picture in enumerate(pictures):
        assert likeness(picture, pictures[0]) > 0.9, number


@pytest.mark.parametrize(
    "name",
    ["grayscale_24x16_sampling2x2", "grayscale_long", "jpg-cmyk-1", "jpg-cmyk-2", "jpg-size-33x33", "jpg-size-8x8"],
)
def test_jpegs_decode_to_their_reference_pixels(folder, name):
    reference = folder / "jpeg-reftest" / f"{name}.png"
    wanted = config((16, 16), resize="squash")

    got, expected = (preprocess(path.read_bytes(), wanted) for path in (reference.with_suffix(".jpg"), reference))

    assert np.abs(got.astype(int) - expected).mean() < 4
