"""`vitserve train`, run as a user runs it: from a folder of pictures to a model that answers, whatever happens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from model.checkpoint import load_checkpoint
from model.training.recipe import Recipe
from service.cli.main import main
from tests.e2e.serving import Served
from tests.service.cli.command_line import write_checkpoint

pytestmark = pytest.mark.timeout(120)  # processes start, each of which imports torch

COLOURS = {"blue": (40, 60, 200), "red": (210, 50, 40)}


def picture(colour: str, seed: int) -> Image.Image:
    rng = np.random.default_rng([seed, *colour.encode()])
    pixels = np.array(COLOURS[colour]) + rng.normal(0, 30, (30, 40, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve pictures of each of two classes."""
    root = tmp_path / "colours"
    for colour in COLOURS:
        (root / colour).mkdir(parents=True)
        for number in range(12):
            picture(colour, number).save(root / colour / f"{number}.jpg")
    return root


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A tiny checkpoint of five classes at 16 pixels."""
    return write_checkpoint(tmp_path / "start", "abcde", width=32, mlp_width=64)


def flags(data: Path, start: Path, out: Path, *more: str) -> list[str]:
    command = ["train", "--data", str(data), "--from", str(start), "--out", str(out), "--device", "cpu"]
    return [*command, "--batch-size", "5", "--set", "learning_rate=3e-3", *more]


def test_a_folder_of_pictures_becomes_a_served_model(
    data: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my model"
    assert main(flags(data, start, out, "--epochs", "6", "--image-size", "24x32", "--name", "colours")) == 0
    assert capsys.readouterr().out == f"{out}: serve it with: vitserve serve --checkpoint '{out}'\n"
    names = {"config.json", "confusion_matrix.csv", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == names
    server = Served(tmp_path / "server.log", warm=True, checkpoint=out, device="cpu", dtype="float32", threads=1)
    try:
        assert server.get("/model").json()["name"] == "colours"
        for colour in COLOURS:
            picture(colour, 99).save(tmp_path / "new.png")
            found = server.classify((tmp_path / "new.png").read_bytes()).json()
            assert found["predictions"][0]["label"] == colour
    finally:
        server.kill()


def test_flags_set_the_fields_of_the_record(data: Path, start: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(flags(data, start, out, "--epochs", "1", "--seed", "5", "--set", "flip=false")) == 0
    expected = Recipe(name="out", checkpoint=str(start), epochs=1, seed=5, batch_size=5, flip=False, learning_rate=3e-3)
    record = json.loads((out / "config.json").read_text())["training"]["recipe"]
    assert Recipe.of(record) == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "epochs"], "--set epochs: expected FIELD=VALUE"),
        (["--set", "speed=1"], "recipe: speed: "),
        (["--set", "learning_rate=fast"], "recipe: learning_rate: "),
        (["--epochs", "0"], "recipe: epochs: "),
        (["--image-size", "20"], "image size 20x20 is not a multiple of the patch size 8"),
        (["--validation", "24"], "cannot set 24 of 24 pictures aside for validation"),
        (["--from", "./nowhere"], "./nowhere: no such folder"),
        (["--device", "cuda:99"], "device 'cuda:99'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line_before_training(
    data: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(flags(data, start, tmp_path / "out", *more)) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vitserve: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--from", "bundled", "--epochs", "3"],
            "vitserve: --probe: --epochs does not apply",
        ),
        (["--from", "bundled", "--set", "seed=1"], "vitserve: --probe: --set does not apply"),
    ],
    ids=["epochs", "set"],
)
def test_flags_that_mean_nothing_to_a_probe_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(["train", "--probe", "--data", str(data), "--out", str(tmp_path / "out"), *more]) == 1
    assert capsys.readouterr().err.startswith(message)


def test_a_probe_is_written_and_says_how_it_is_served(
    data: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    assert (
        main(["train", "--probe", "--data", str(data), "--from", str(start), "--out", str(out), "--threads", "1"]) == 0
    )
    assert capsys.readouterr().out == f"{out}: serve it with: vitserve serve --checkpoint {out}\n"
    checkpoint = load_checkpoint(str(out))
    assert (checkpoint.name, checkpoint.labels) == ("mine", tuple(COLOURS))
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "confusion_matrix.csv"}
