"""`vitserve train` as a command, from a folder of pictures to a serving model, and its failures."""

import csv
import json
import re
import signal
from pathlib import Path

import pytest

from model.checkpoint import load_checkpoint
from model.extensions.training.recipe import RECIPES, read_recipe
from service.cli.main import main
from tests.e2e.serving import Served
from tests.extensions.datasets.picture_folders import write_class
from tests.launcher import VitserveProcess, until
from tests.service.cli.command_line import run, write_checkpoint

pytestmark = pytest.mark.timeout(120)  # processes start, each of which imports torch

COLOURS = ("blue", "red")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write twelve pictures of each of two classes."""
    for colour in COLOURS:
        write_class(tmp_path / "colours" / colour, colour, 12)
    return tmp_path / "colours"


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """Write a tiny checkpoint of five classes at 16 pixels."""
    return write_checkpoint(tmp_path / "start", "abcde", width=32, mlp_width=64)


def flags(data: Path, start: Path, out: Path, *more: str) -> list[str]:
    values = {"--data": data, "--from": start, "--out": out, "--device": "cpu", "--batch-size": 5}
    # A flag that stands twice is refused.
    command = [
        text for flag, value in values.items() if flag not in more for text in (flag, str(value))
    ]
    return ["train", *command, "--set", "optimiser.learning_rate=3e-3", *more]


def epochs_done(out: Path) -> list[dict[str, str]]:
    path = out / "metrics.csv"
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def test_a_folder_becomes_a_served_model(
    data: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my model"
    assert (
        main(flags(data, start, out, "--epochs", "6", "--image-size", "24x32", "--name", "colours"))
        == 0
    )
    assert capsys.readouterr().out == f"{out}: serve it with: vitserve serve --checkpoint '{out}'\n"
    names = {"MODEL_CARD.md", "config.json", "metrics.csv", "model.safetensors", "recipe.json"}
    assert names <= {path.name for path in out.iterdir()}
    server = Served(
        tmp_path / "server.log", warm=True, checkpoint=out, device="cpu", dtype="float32", threads=1
    )
    try:
        assert server.get("/model").json()["name"] == "colours"
        for colour in COLOURS:
            [new] = write_class(tmp_path / "new", colour, 1, seed=99)
            found = server.classify(new.read_bytes()).json()
            assert found["predictions"][0]["label"] == colour
    finally:
        server.kill()


def test_a_kill_loses_at_most_one_epoch(data: Path, start: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = flags(data, start, out, "--epochs", "8", "--threads", "1")
    with VitserveProcess(tmp_path / "log", *arguments, warm=True) as training:
        until(lambda: len(epochs_done(out)) >= 2 or training.process.poll() is not None)
    assert training.process.returncode == -signal.SIGKILL
    before = epochs_done(out)
    assert 2 <= len(before) < 8
    assert not (out / "config.json").exists()
    assert (
        main(["train", "--data", str(data), "--out", str(out), "--device", "cpu", "--resume"]) == 0
    )
    after = epochs_done(out)
    assert after[: len(before)] == before
    assert [int(row["epoch"]) for row in after] == list(range(1, 9))
    assert load_checkpoint(str(out)).labels == COLOURS


def test_flags_override_the_recipe(data: Path, start: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    recipe = tmp_path / "mine.toml"
    recipe.write_text((RECIPES / "finetune.toml").read_text().replace("epochs = 20", "epochs = 7"))
    more = ["--recipe", str(recipe), "--epochs", "1", "--seed", "5", "--set", "mixing.mixup=0.2"]
    assert main(flags(data, start, out, *more)) == 0
    record = read_recipe(out / "recipe.json")
    assert record == read_recipe(recipe).override(
        {
            "epochs": 1,
            "seed": 5,
            "name": "out",
            "batch_size": 5,
            "checkpoint": str(start),
            "mixing.mixup": 0.2,
            "optimiser.learning_rate": 3e-3,
        }
    )


def test_a_recipe_is_named_by_file_or_name(
    data: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = ["train", "--data", str(data), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main([*scratch, "--recipe", "nowhere"]) == 1
    assert (
        "vitserve: --recipe nowhere: no such file, and not one of cifar10"
        in capsys.readouterr().err
    )
    assert main([*scratch, "--recipe", "cifar10"]) == 1
    assert "cannot set 2500 of 24 pictures aside" in capsys.readouterr().err
    assert main(scratch) == 1
    assert "--from CHECKPOINT: needed for a folder of pictures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "epochs"], "--set epochs: expected FIELD=VALUE"),
        (["--set", "speed=1"], "recipe: speed: "),
        (["--set", "optimiser.learning_rate=fast"], "recipe: optimiser.learning_rate: "),
        (["--epochs", "0"], "recipe: epochs: "),
        (["--image-size", "20"], "image size 20x20 is not a multiple of the patch size 8"),
        (["--validation", "24"], "cannot set 24 of 24 pictures aside for validation"),
        (
            ["--data", "./nowhere"],
            "nowhere: no such folder: give a folder with one subfolder of pictures per class",
        ),
        (["--from", "./nowhere"], "./nowhere: no such folder"),
        (["--device", "cuda:99"], "device 'cuda:99'"),
        (["--resume"], "out holds no run (recipe.json): leave --resume out to begin one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_before_training(
    data: Path,
    start: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    assert main(flags(data, start, tmp_path / "out", *more)) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vitserve: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out" / "last.pt").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "vitserve: --probe: needs --from CHECKPOINT, whose features it reads"),
        (
            ["--from", "bundled", "--epochs", "3"],
            "vitserve: --probe: --epochs does not apply",
        ),
        (["--from", "bundled", "--resume"], "vitserve: --probe: --resume does not apply"),
        (["--from", "bundled", "--set", "seed=1"], "vitserve: --probe: --set does not apply"),
    ],
    ids=["nothing", "epochs", "resume", "set"],
)
def test_unused_flags_of_a_probe_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert (
        main(["train", "--probe", "--data", str(data), "--out", str(tmp_path / "out"), *more]) == 1
    )
    assert capsys.readouterr().err.startswith(message)


def test_a_probe_says_how_it_is_served(
    data: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    assert (
        main(
            [
                "train",
                "--probe",
                "--data",
                str(data),
                "--from",
                str(start),
                "--out",
                str(out),
                "--threads",
                "1",
            ]
        )
        == 0
    )
    told = capsys.readouterr()
    assert "without calibration.json" in told.err
    assert told.out == f"{out}: serve it with: vitserve serve --checkpoint {out}\n"
    checkpoint = load_checkpoint(str(out))
    assert (checkpoint.name, checkpoint.labels) == ("mine", COLOURS)
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "confusion_matrix.csv",
        "split.json",
    }


def test_calibrate_uses_held_out_pictures(
    data: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(flags(data, start, out, "--epochs", "1", "--validation", "0.5")) == 0
    moved = data.rename(tmp_path / "moved")
    calibrate = ("calibrate", out, "--device", "cpu", "--coverage", "0.5", "--data")
    code, told, err = run(capsys, *calibrate, moved, "--out", tmp_path / "copy")
    assert (code, "out: 12 pictures; scores as" in told) == (0, True)
    assert (
        f"{moved}: 12 pictures that {out} was not trained on are used, 12 others are not\n" in err
    )
    code, told, _ = run(
        capsys, "evaluate", "--data", moved, "--checkpoint", tmp_path / "copy", "--device", "cpu"
    )
    assert (code, "\n12 of these 24 pictures were trained on: new pictures" in told) == (0, True)

    trained = json.loads((out / "split.json").read_text())["train"]
    for name in trained:
        kept = tmp_path / "seen" / Path(name).relative_to(data)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes((moved / Path(name).relative_to(data)).read_bytes())
    for checkpoint in (out, tmp_path / "copy"):
        code, _, err = run(
            capsys, "calibrate", checkpoint, "--device", "cpu", "--data", tmp_path / "seen"
        )
        assert (
            code,
            f"12 of 12 pictures were trained on by {checkpoint}: give other pictures, or" in err,
        ) == (1, True)


def test_calibrate_refuses_probe_pictures(
    data: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    probe = (
        "train",
        "--probe",
        "--data",
        data,
        "--from",
        start,
        "--out",
        out,
        "--device",
        "cpu",
        "--threads",
        "1",
    )
    assert run(capsys, *probe)[0] == 0
    calibrate = ("calibrate", out, "--device", "cpu", "--coverage", "0.5", "--data")
    code, _, err = run(capsys, *calibrate, data)
    assert (code, f"24 of 24 pictures were trained on by {out}: give other pictures\n" in err) == (
        1,
        True,
    )
    for colour in COLOURS:
        write_class(tmp_path / "split" / "test" / colour, colour, 5, seed=7)
    data.rename(tmp_path / "split" / "val")
    code, told, _ = run(capsys, *calibrate, tmp_path / "split")
    assert (code, "mine: 10 pictures; scores as" in told) == (0, True)


def test_a_start_trained_on_data_is_named(
    data: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = (
        "train",
        "--probe",
        "--data",
        data,
        "--from",
        start,
        "--out",
        tmp_path / "probe",
        "--device",
        "cpu",
    )
    assert run(capsys, *probe, "--threads", "1")[0] == 0
    assert (
        main(
            flags(data, tmp_path / "probe", tmp_path / "out", "--epochs", "1", "--validation", "6")
        )
        == 0
    )
    assert re.search(
        "6 of 6 validation pictures, such as .*, were trained on by", capsys.readouterr().err
    )
    assert run(capsys, "calibrate", tmp_path / "out", "--device", "cpu", "--data", data)[0] == 1
