"""A model has the name of its folder or repository, not of its pretrained base."""

import os
from pathlib import Path

import pytest

from model.checkpoint import load_checkpoint
from tests.model.checkpoint.folders import huggingface_folder, put, timm_folder


def test_a_timm_folder_is_named_as_itself(tmp_path: Path) -> None:
    assert load_checkpoint(str(timm_folder(tmp_path / "birds"))).name == "birds"


def test_transformers_folder_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = huggingface_folder(tmp_path / "birds")
    put(folder / "config.json", "_name_or_path", "google/vit-base-patch16-224")
    assert load_checkpoint(str(folder)).name == "birds"
    monkeypatch.chdir(folder)
    assert load_checkpoint(os.curdir).name == "birds"


@pytest.mark.parametrize("make", [timm_folder, huggingface_folder])
def test_a_snapshot_has_its_repositorys_name(make: object, tmp_path: Path) -> None:
    folder = tmp_path / "models--me--birds" / "snapshots" / "abc"
    folder.parent.mkdir(parents=True)
    assert callable(make)
    make(folder)
    assert load_checkpoint(str(folder)).name == "me/birds"
