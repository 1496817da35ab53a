"""`vitserve embed` and `vitserve attention`, run as a user runs them."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from model.checkpoint import load_checkpoint
from model.outputs import EmbeddingRequest, RequestedOutputs
from model.runtime.predictor import Predictor
from service.cli.image_files import read_input
from service.settings import load_settings
from tests.service.cli.command_line import run, write_checkpoint, write_pictures

pytestmark = pytest.mark.timeout(90)  # checkpoints are loaded, and answer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), ("cat", "dog"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = write_pictures(tmp_path / "pictures", "b.png", "a.jpg", "deep/c.webp")
    (folder / "aa.png").write_bytes((folder / "b.png").read_bytes()[:60])
    return folder


def names(file: Path) -> list[tuple[str, str]]:
    with file.open(newline="") as opened:
        return [(row["row"], Path(row["file"]).name) for row in csv.DictReader(opened)]


def test_headless_models_classify_nothing(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headless = write_checkpoint(tmp_path / "headless", ())
    picture = pictures / "b.png"
    options = "--checkpoint", headless, "--dtype", "float32"
    code, _, err = run(capsys, "classify", picture, *options)
    assert (code, err.count("\n")) == (1, 1)
    assert "the model has no classification head: it gives embeddings" in err
    assert run(capsys, "embed", picture, "-o", tmp_path / "a.npy", *options)[0] == 0
    assert np.load(tmp_path / "a.npy").shape == (1, 16)
    code, out, err = run(capsys, "attention", picture, "-o", tmp_path / "a.png", *options)
    assert (code, err) == (0, "")
    assert "a.png: cls" in out


def test_table_of_another_program_is_kept(
    checkpoint: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "features.csv"
    table.write_text("name,price\n")
    command = "embed", pictures / "b.png", "-o", tmp_path / "features.npy"
    code, _, err = run(capsys, *command, "--checkpoint", checkpoint)
    assert code == 1
    assert f"{table}: exists, and would be replaced: name another FILE.npy" in err
    assert table.read_text() == "name,price\n"
    table.unlink()
    for _ in range(2):  # the second run replaces the files of the first
        assert run(capsys, *command, "--checkpoint", checkpoint)[0] == 0


def test_table_names_the_file_of_each_row(
    checkpoint: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "features.npy"
    options = ("--pool", "mean", "--normalize", "--dtype", "float32")
    code, out, err = run(
        capsys, "embed", pictures, "-o", output, "--checkpoint", checkpoint, *options
    )
    assert (code, out) == (1, "")
    assert f"vitserve: {pictures / 'aa.png'}: " in err
    assert err.endswith("vitserve: 1 of 4 files have no embedding\n")
    assert names(output.with_suffix(".csv")) == [("0", "a.jpg"), ("1", "b.png"), ("2", "c.webp")]
    found = np.load(output)
    assert (found.shape, found.dtype) == ((3, 16), np.float32)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    loaded = load_checkpoint(str(checkpoint))
    settings = load_settings({})
    predictor = Predictor(loaded, device="cpu", dtype="float32", compile_mode="off")
    for row, file in zip(found, ("a.jpg", "b.png", "deep/c.webp"), strict=True):
        seen = read_input(pictures / file, loaded.preprocess, settings)
        assert not isinstance(seen, str)
        asked = RequestedOutputs(1, embedding=EmbeddingRequest("mean", True))
        [expected] = predictor.predict(seen.pixels[np.newaxis], asked)
        assert expected.embedding is not None
        np.testing.assert_allclose(row, expected.embedding, atol=1e-4)


LABELS = ("tabby, tabby cat", "tiger", "crane", "crane")


@pytest.fixture(scope="module")
def cats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), LABELS)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "pictures", "b.png", "a.jpg", "deep/a.webp")


def size_of(file: Path) -> tuple[int, int]:
    with Image.open(file) as picture:
        picture.load()
        return picture.size


def test_a_sheet_comes_beside_the_maps(
    cats: Path, three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maps = tmp_path / "maps"
    sheet = tmp_path / "sheet.png"
    code, out, _ = run(
        capsys, "attention", three, "-o", maps, "--sheet", sheet, "--checkpoint", cats
    )
    assert code == 0
    assert sorted(file.name for file in maps.iterdir()) == [
        "a-2.heat.png",
        "a.heat.png",
        "b.heat.png",
    ]
    assert {size_of(file) for file in maps.iterdir()} == {(384, 312)}, (
        "the whole photo, and a caption below"
    )
    assert size_of(sheet)[0] > 384
    assert len(out.splitlines()) == 3
    assert all(", relevance, evidence " in line for line in out.splitlines())


def test_classes_stand_beside_the_picture(
    cats: Path, three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "attention",
        three / "b.png",
        "--checkpoint",
        cats,
        "--class",
        "tabby",
        "--class",
        "1",
    ]
    code, out, _ = run(
        capsys, *common, "-o", tmp_path / "x.png", "--side-by-side", "--method", "relevance"
    )
    assert code == 0
    assert all(f"{label} (" in out for label in ("tabby, tabby cat", "tiger"))
    assert out.count(", relevance, evidence ") == 2
    assert size_of(tmp_path / "x.png")[0] == 3 * 384 + 2 * 4
    before = set(tmp_path.rglob("*"))
    sheet = tmp_path / "sheet.png"
    assert run(capsys, *common, "--sheet", sheet)[0] == 0
    assert set(tmp_path.rglob("*")) - before == {sheet}, "a sheet alone needs no folder"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "magic"], "method 'magic': expected one of relevance, cls"),
        (["--class", "lion"], "class 'lion' is unknown"),
        (["--class", "crane"], "ambiguous: 2, 3 are called that"),
        (["--class", "4"], "an index below 4"),
        (["--class", "1", "--method", "cls"], "class does not apply to method 'cls'"),
    ],
)
def test_an_impossible_map_is_one_line(
    flags: list[str],
    message: str,
    cats: Path,
    three: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ["attention", three / "b.png", "-o", tmp_path / "x.png", "--checkpoint", cats]
    code, _, err = run(capsys, *common, *flags)
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1


def test_bad_file_spares_the_other_maps(
    cats: Path, three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (three / "bad.png").write_bytes(b"no picture")
    maps = tmp_path / "maps"
    sheet = tmp_path / "sheet.png"
    asked = [
        "attention",
        three,
        "-o",
        maps,
        "--sheet",
        sheet,
        "--checkpoint",
        cats,
        "--method",
        "cls",
    ]
    code, out, err = run(capsys, *asked)
    assert code == 1
    assert "bad.png: not a picture" in err
    assert len(list(maps.iterdir())) == 3
    assert all(line.endswith(": cls") for line in out.splitlines())
    assert size_of(sheet)[0] > 320
