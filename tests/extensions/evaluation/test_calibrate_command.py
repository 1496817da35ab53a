"""`vitserve calibrate`, the answers of its folder, and `vitserve evaluate`, as commands."""

import csv
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.service.cli.command_line import run, write_checkpoint, write_pictures

pytestmark = pytest.mark.timeout(90)  # checkpoints are loaded, and answer

HERE = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", ("cat", "dog", "fox"))


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for number in range(60):
        path = tmp_path / "labelled" / ("cat", "dog", "fox")[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    return tmp_path / "labelled"


def test_classes_without_pictures_are_named(
    checkpoint: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--checkpoint", checkpoint, *HERE)
    assert "no pictures of" not in run(capsys, "evaluate", "--data", labelled, *model)[1]
    shutil.rmtree(labelled / "cat")
    _, out, _ = run(capsys, "evaluate", "--data", labelled, *model)
    assert "no pictures of 1 of 3 classes: cat\n" in out


def test_a_calibrated_folder_answers_in_sets(
    checkpoint: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = (checkpoint / "model.safetensors").read_bytes()
    code, out, err = run(capsys, "calibrate", checkpoint, "--data", labelled, *HERE)
    assert code == 0, err
    assert "tiny: 60 pictures; scores as they were: too few to fit them (150 are enough)" in out
    assert re.findall(r"^ +(0\.\d+) +[\d.]+% +[\d.]+ +[\d.]+%$", out, re.MULTILINE) == [
        "0.8",
        "0.9",
    ]
    assert "serve --checkpoint" in out
    assert (checkpoint / "model.safetensors").read_bytes() == weights
    assert json.loads((checkpoint / "calibration.json").read_text())["data"] == "labelled"

    model = ("--checkpoint", checkpoint, *HERE)
    code, out, _ = run(capsys, "evaluate", "--data", labelled, "--coverage", "0.9", *model)
    sets = re.search(
        r"sets for a coverage of 0.9: ([\d.]+)% hold the right label, "
        r"([\d.]+) labels .*, [\d.]+% abs",
        out,
    )
    assert code == 0
    assert sets is not None
    assert float(sets[1]) >= 90  # on the pictures that the sets were fitted to
    assert 1 <= float(sets[2]) <= 3

    picture = write_pictures(tmp_path / "p", "a.png") / "a.png"
    answers = {}
    for coverage in ("0.5", "0.95"):
        _, out, _ = run(capsys, "classify", picture, "--json", "--coverage", coverage, *model)
        answers[coverage] = json.loads(out)
    assert answers["0.5"]["set_size"] <= answers["0.95"]["set_size"]
    ranked = [each["label"] for each in answers["0.95"]["predictions"]]
    assert answers["0.95"]["set"] == ranked[: answers["0.95"]["set_size"]]
    _, out, _ = run(capsys, "classify", picture, "--coverage", "0.95", *model)
    assert out.splitlines()[-1] == f"  one of: {'; '.join(answers['0.95']['set'])}"
    _, out, _ = run(capsys, "classify", picture, "--csv", "--coverage", "0.95", *model)
    told = [
        {name: row[name] for name in ("set", "set_size", "abstained")}
        for row in csv.DictReader(io.StringIO(out))
    ]
    size = str(answers["0.95"]["set_size"])
    assert (
        told
        == [{"set": "; ".join(answers["0.95"]["set"]), "set_size": size, "abstained": "False"}] * 3
    )
    _, out, _ = run(capsys, "classify", picture, "--json", *model)
    assert list(json.loads(out)) == ["file", "predictions", "abstained"]
    _, out, _ = run(capsys, "classify", picture, "--csv", *model)
    assert {
        (row["set"] + row["set_size"], row["abstained"]) for row in csv.DictReader(io.StringIO(out))
    } == {("", "False")}

    code, _, err = run(capsys, "classify", picture, "--coverage", "0.99", *model)
    assert (code, err.count("\n")) == (1, 1)
    assert "calibrated on 60 pictures, too few for a coverage of 0.99: 199 are enough" in err


def test_an_unlike_picture_is_abstained_from(
    checkpoint: Path,
    labelled: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(capsys, "calibrate", checkpoint, "--data", labelled, "--out", tmp_path / "new", *HERE)
    assert not (checkpoint / "calibration.json").exists()
    picture = write_pictures(tmp_path / "p", "a.png") / "a.png"
    monkeypatch.setattr(
        "model.calibration.LabelSets.members",
        lambda self, scores, _: np.zeros_like(scores, np.bool_),
    )
    model = ("--coverage", "0.9", "--checkpoint", tmp_path / "new", *HERE)
    _, out, _ = run(capsys, "classify", picture, *model)
    assert out.splitlines()[-1] == "  abstained: unlike the pictures of its classes"
    _, out, _ = run(capsys, "classify", picture, "--json", *model)
    assert json.loads(out) | {"abstained": True, "set": [], "set_size": 0} == json.loads(out)
    _, out, _ = run(capsys, "classify", picture, "--csv", "--top-k", "1", *model)
    assert out.splitlines()[1].endswith(",,,0,True,coverage")
    code, out, _ = run(capsys, "evaluate", "--unknown", tmp_path / "p", picture, *model)
    assert code == 0
    assert re.fullmatch(
        r"2 pictures of none of its .* is [\d.]+% .* above 90% for [\d.]+%; 100.0% abstained\n", out
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["bundled", "--data", "{labelled}"],
            "bundled: not a folder of yours: give --out DIR, which gets a calibrated copy$",
        ),
        (
            ["{m}", "--data", "{labelled}", "--coverage", "0.99"],
            "60 pictures .* 0.99: 199 are enough, and these for 0.96",
        ),
        (
            ["{m}", "--data", "{labelled}", "--image-size", "24"],
            "--image-size makes another model .*: give --out DIR, ",
        ),
        (["{hub}", "--data", "{labelled}"], "abc: not a folder of yours: give --out DIR, "),
        (
            ["nowhere", "--data", "{labelled}"],
            "nowhere: no such folder$",
        ),
        (["{m}", "--data", "{labelled}", "--out", "{m}"], "exists and is not an empty folder"),
        (["{none}", "--data", "{labelled}"], "the model has no classification head"),
        (["{m}", "--data", "{m}"], "m: no pictures: expected one folder"),
    ],
)
def test_failed_calibration_is_one_line(
    flags: list[str],
    message: str,
    checkpoint: Path,
    labelled: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub = tmp_path / "models--a--b" / "snapshots" / "abc"
    names = {"m": checkpoint, "labelled": labelled, "none": tmp_path / "none", "hub": hub}
    if "{hub}" in flags:
        shutil.copytree(checkpoint, hub)
    if "{none}" in flags:
        write_checkpoint(tmp_path / "none", ())
    code, out, err = run(capsys, "calibrate", *(flag.format(**names) for flag in flags), *HERE)
    lines = [line for line in err.splitlines() if line.startswith("vitserve: ")]
    assert (code, out, len(lines)) == (1, "", 1)
    assert re.search(message, lines[0])


LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
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


def test_pictures_are_measured_as_served(
    evaluated: Path, cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = np.fromfile(cifar / "test_batch.bin", dtype=np.uint8).reshape(60, -1)
    for number, record in enumerate(records):
        path = tmp_path / "folder" / "test" / LABELS[record[0]] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(record[1:].reshape(3, 32, 32).transpose(1, 2, 0)).save(path)
        (tmp_path / "folder" / "train" / LABELS[record[0]]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "folder" / "train" / LABELS[record[0]] / "0.png")
    flags = ["--checkpoint", evaluated, "--dtype", "float32", "--device", "cpu"]
    _, by_file, _ = run(capsys, "evaluate", "--data", tmp_path / "folder", *flags)
    _, by_array, _ = run(capsys, "evaluate", "--data", cifar, *flags)
    assert by_file == by_array
    assert "of 60 test images right" in by_file
