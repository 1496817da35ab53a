"""`calibration.json` of a native folder: its effect, and when it is refused, unused or removed."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model.calibration import CALIBRATION_FILE, Calibration, Fit, label_sets_of
from model.checkpoint import load_checkpoint, native
from model.errors import CheckpointError
from model.heads import Form
from tests.model.checkpoint.folders import edit, edit_tensors, put, refusal
from tests.service.cli.command_line import write_checkpoint

CALIBRATION = Calibration.of(
    "pictures", 50, Fit(1.5), np.linspace(0, 1, 39), np.linspace(-1, 3, 39)
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "m", ("cat", "dog"))
    native.write_calibration(folder, CALIBRATION)
    return folder


def test_calibration_gives_temperature(folder: Path) -> None:
    assert not list(folder.glob("*.part"))
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.temperature == 1.5
    assert label_sets_of(checkpoint.calibration, 0.95, "m").least_energy == -1
    with pytest.raises(
        CheckpointError, match=r"on 39 pictures, too few for .* 0\.99: 199 are enough"
    ):
        label_sets_of(checkpoint.calibration, 0.99, "m")
    (folder / CALIBRATION_FILE).unlink()
    with pytest.raises(
        CheckpointError, match=r"^m: is not calibrated, .*VIT_COVERAGE.*: `vitserve calibrate"
    ):
        label_sets_of(load_checkpoint(str(folder)).calibration, 0.95, "m")


def test_form_of_scores_is_kept(folder: Path, tmp_path: Path) -> None:
    form = Form(power=1.8, crowding=0.25)
    native.write_calibration(folder, CALIBRATION.model_copy(update={"form": form}))
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.form == form
    assert label_sets_of(checkpoint.calibration, 0.95, "m").form == form
    native.write(tmp_path / "copy", checkpoint, dtype=torch.float16)
    assert load_checkpoint(str(tmp_path / "copy")).form == form
    put(folder / CALIBRATION_FILE, "form.crowding", 0.3)
    assert "calibration.json: is not what" in refusal(folder)


def test_calibration_without_a_form_is_read(folder: Path) -> None:
    for file in ("config.json", CALIBRATION_FILE):
        edit(folder / file, lambda written: written.pop("form"))
    config, written = (
        json.loads((folder / file).read_text()) for file in ("config.json", CALIBRATION_FILE)
    )
    signed = [
        {name: each for name, each in written.items() if name != "digest"},
        hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        *(config[name] for name in ("architecture", "preprocess")),
    ]
    assert (
        written["digest"] == hashlib.sha256(json.dumps(signed, sort_keys=True).encode()).hexdigest()
    )
    checkpoint = load_checkpoint(str(folder))
    assert (checkpoint.temperature, checkpoint.form) == (1.5, Form())


def _other_weights(folder: Path) -> None:
    edit_tensors(
        folder, lambda tensors: tensors.update({name: each / 2 for name, each in tensors.items()})
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: put(folder / CALIBRATION_FILE, "temperature", 1.6),
        lambda folder: put(folder / CALIBRATION_FILE, "digest", "0" * 64),
        lambda folder: put(folder / "config.json", "preprocess.interpolation", "bilinear"),
        _other_weights,
    ],
)
def test_a_foreign_calibration_is_refused(change: Callable[[Path], None], folder: Path) -> None:
    change(folder)
    assert re.search(r"calibration\.json: is not what .* wrote .*: remove", refusal(folder))


def test_labels_may_change_after_calibration(folder: Path) -> None:
    edit(
        folder / "config.json",
        lambda config: config.update(labels=["Katze", "Hund"], temperature=3),
    )
    checkpoint = load_checkpoint(str(folder))
    assert (checkpoint.labels, checkpoint.temperature) == (("Katze", "Hund"), 1.5)


def test_another_size_drops_the_calibration(folder: Path) -> None:
    assert load_checkpoint(str(folder), image_size=(16, 16)).calibration is not None
    checkpoint = load_checkpoint(str(folder), image_size=(24, 24))
    assert (checkpoint.temperature, checkpoint.calibration) == (1.0, None)
    assert checkpoint.notes == (checkpoint.unused_calibration,)
    with pytest.raises(CheckpointError, match=r"0\.8 .*not used: .*: leave .* or calibrate with"):
        label_sets_of(checkpoint.calibration, 0.8, checkpoint.source, checkpoint.unused_calibration)


@pytest.mark.parametrize(("dtype", "goes_along"), [(torch.float32, True), (torch.float16, False)])
def test_rounded_weights_drop_calibration(
    folder: Path, tmp_path: Path, dtype: torch.dtype, goes_along: bool
) -> None:
    native.write(tmp_path / "copy", load_checkpoint(str(folder)), dtype=dtype)
    copy = load_checkpoint(str(tmp_path / "copy"))
    assert (copy.calibration is not None, copy.temperature) == (goes_along, 1.5)
    native.write(folder, replace(copy, calibration=None))
    assert load_checkpoint(str(folder)).calibration is None
