"""`vitserve evaluate --explanations`, as a user runs it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from model.explanation.methods import EXPLANATIONS
from model.outputs import CLASS_SPECIFIC
from tests.service.cli.command_line import run, write_checkpoint

pytestmark = pytest.mark.timeout(90)  # checkpoints are loaded, and answer

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ESTIMATE = r"(\d\.\d{3}) \[(\d\.\d{3}), (\d\.\d{3})\]"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", "abcdefgh", image_size=(32, 32), patch_size=4)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Pictures of few colours, which the bundled model takes for two different classes."""
    folder = tmp_path / "pictures"
    (folder / "deep").mkdir(parents=True)
    for number, name in enumerate(("1.png", "2.png", "deep/3.jpg", "deep/4.webp", "deep/5.png", "6.png")):
        colours = np.random.default_rng(number).integers(0, 256, (2, 2, 3), dtype=np.uint8)
        Image.fromarray(colours.repeat(16, axis=0).repeat(16, axis=1)).save(folder / name)
    return folder


def test_the_table_has_the_means_of_the_csv_and_the_figure_is_drawn(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", pictures, "--device", "cpu", "--steps", 4]
    files = ["--csv", tmp_path / "e.csv", "--figure", tmp_path / "e.png"]
    code, out, _ = run(capsys, "evaluate", "--explanations", "cls", *flags, *files)
    assert code == 0
    assert "vit-cifar10 on cpu in float32: 6 pictures, 4 steps" in out
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "e.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = ["1.png", "2.png", "6.png", "deep/3.jpg", "deep/4.webp", "deep/5.png"]
    assert [(row["picture"], row["method"]) for row in rows] == [(n, m) for n in names for m in ("random", "cls")]
    assert all(row["label"] == LABELS[int(row["class"])] for row in rows)
    counted = re.search(r"mosaic: (\d+) of 24 quarters count", out)
    assert counted is not None
    for method in ("random", "cls"):
        own = [row for row in rows if row["method"] == method]
        line = re.search(rf"^{method} +{ESTIMATE} +{ESTIMATE} +{ESTIMATE} +-$", out, re.MULTILINE)
        assert line is not None
        values = [float(value) for value in line.groups()]
        assert values[0] == pytest.approx(np.mean([float(row["deletion"]) for row in own]), abs=6e-4)
        assert values[3] == pytest.approx(np.mean([float(row["insertion"]) for row in own]), abs=6e-4)
        weights = [int(row["quarters"]) for row in own]
        assert sum(weights) == int(counted[1])
        shares = [float(row["mosaic"] or 0) for row in own]
        assert values[6] == pytest.approx(np.average(shares, weights=weights), abs=6e-4)
        assert all(low <= mean <= high for mean, low, high in (values[0:3], values[3:6], values[6:9]))
    assert int(counted[1]) > 0
    _, other, _ = run(capsys, "evaluate", "--explanations", "cls", *flags, "--seed", 1)
    assert out.splitlines()[:2] == other.splitlines()[:2]
    assert out.splitlines()[4] != other.splitlines()[4]  # the baseline


def test_all_methods_are_measured_on_pictures_spaced_evenly_and_a_bad_one_is_named(
    checkpoint: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "6.png").write_bytes(b"no picture")
    flags = ["--data", pictures, "--checkpoint", checkpoint, "--device", "cpu", "--steps", 1, "--limit", 3]
    code, out, err = run(capsys, "evaluate", *flags, "--csv", tmp_path / "e.csv", "--explanations")
    assert code == 1
    assert "6.png: left out" in err
    with (tmp_path / "e.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = out.splitlines()
    of_classes = [method for method in EXPLANATIONS if method in CLASS_SPECIFIC]
    assert [line.split(":")[0] for line in lines[3:6]] == of_classes, "each with its highest peak"
    for row in rows:
        assert (row["absent"] != "") == (row["method"] in CLASS_SPECIFIC)
        assert row["absent"] == "" or 0 < float(row["absent"]) <= float(row["highest"]) <= 16
    methods = [line.split()[0] for line in lines[7:]]
    assert sorted(methods) == sorted({"random", "cls", *EXPLANATIONS})
    assert methods[0] == "random"
    assert [(row["picture"], row["method"]) for row in rows] == [
        (n, m) for n in ("1.png", "deep/4.webp") for m in methods
    ]
    for line in lines[7:]:  # two pictures make no mosaic
        assert re.search(rf" -  +{ESTIMATE}$" if line.split()[0] in CLASS_SPECIFIC else " -  +-$", line)


def test_cifar10s_files_are_taken_too(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    (tmp_path / "cifar").mkdir()
    records = generator.integers(0, 256, (20, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    records.tofile(tmp_path / "cifar" / "test_batch.bin")
    (tmp_path / "cifar" / "batches.meta.txt").write_text("\n".join(LABELS))
    flags = ["--checkpoint", checkpoint, "--device", "cpu", "--steps", 1, "--limit", 2, "--csv", tmp_path / "e.csv"]
    code, _, _ = run(capsys, "evaluate", "--data", tmp_path / "cifar", *flags, "--explanations", "cls")
    assert code == 0
    with (tmp_path / "e.csv").open() as file:
        assert [row["picture"] for row in csv.DictReader(file)][::2] == ["test image 0", "test image 10"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--explanations", "cls", "magic"], "method 'magic': expected some of random, cls"),
        (["--explanations", "--robustness"], "--robustness is not for --explanations"),
        (["--explanations", "--url", "http://127.0.0.1:1"], "--url is not for --explanations"),
        (["--explanations", "--dtype", "bfloat16"], "--explanations computes in float32"),
        (["--explanations", "--csv", "absent/e.csv"], "absent: no such folder"),
        (["--explanations", "--figure", "absent/e.png"], "absent: no such folder"),
        (["--steps", "3"], "--steps needs --explanations"),
        (["--figure", "e.png"], "--figure needs --explanations"),
    ],
)
def test_flags_that_do_not_work_are_one_line(
    flags: list[str], message: str, checkpoint: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "evaluate", "--data", pictures, "--checkpoint", checkpoint, *flags)
    assert code == 1
    assert message in err
    assert err.count("\n") == 1
    assert out == ""
