"""`vitserve embed`, run as a user runs it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

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


def test_a_checkpoint_without_a_head_is_embedded_and_drawn_but_not_classified(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headless, picture = write_checkpoint(tmp_path / "headless", ()), pictures / "b.png"
    options = "--checkpoint", headless, "--dtype", "float32"
    code, _, err = run(capsys, "classify", picture, *options)
    assert (code, err.count("\n")) == (1, 1)
    assert "the model has no classification head: it gives embeddings" in err
    assert run(capsys, "embed", picture, "-o", tmp_path / "a.npy", *options)[0] == 0
    assert np.load(tmp_path / "a.npy").shape == (1, 16)
    code, out, err = run(capsys, "attention", picture, "-o", tmp_path / "a.png", *options)
    assert (code, err) == (0, "")
    assert "a.png: cls" in out
    code, out, _ = run(capsys, "inspect", headless)
    assert (code, "no classification head" in out) == (0, True)
    code, out, err = run(capsys, "convert", headless, "-o", tmp_path / "again")
    assert (code, err) == (0, "")
    assert load_checkpoint(str(tmp_path / "again")).config.num_classes == 0


def test_each_row_is_the_embedding_of_the_file_that_the_table_names(
    checkpoint: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, options = tmp_path / "features.npy", ("--pool", "mean", "--normalize", "--dtype", "float32")
    code, out, err = run(capsys, "embed", pictures, "-o", output, "--checkpoint", checkpoint, *options)
    assert (code, out) == (1, "")
    assert f"vitserve: {pictures / 'aa.png'}: " in err
    assert err.endswith("vitserve: 1 of 4 files have no embedding\n")
    assert names(output.with_suffix(".csv")) == [("0", "a.jpg"), ("1", "b.png"), ("2", "c.webp")]
    found = np.load(output)
    assert (found.shape, found.dtype) == ((3, 16), np.float32)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    loaded, settings = load_checkpoint(str(checkpoint)), load_settings({})
    predictor = Predictor(loaded, device="cpu", dtype="float32", compile_mode="off")
    for row, file in zip(found, ("a.jpg", "b.png", "deep/c.webp"), strict=True):
        seen = read_input(pictures / file, loaded.preprocess, settings)
        assert not isinstance(seen, str)
        asked = RequestedOutputs(1, embedding=EmbeddingRequest("mean", True))
        [expected] = predictor.predict(seen.pixels[np.newaxis], asked)
        assert expected.embedding is not None
        np.testing.assert_allclose(row, expected.embedding, atol=1e-4)
