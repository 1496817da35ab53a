"""Whatever moment a run is killed at, it resumes to the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.training.recipe import Recipe
from model.training.training_data import TrainingData
from tests.model.training.runs import EVERYTHING, make_trainer, resumed, same, trained

pytestmark = pytest.mark.timeout(120)  # processes start, each of which imports torch

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("run_to_be_killed.py")
STEPS = 8
"""An epoch of the fixtures' recipe."""


def killed_after(job: Path, folder: Path, *lines: str) -> None:
    """Start or resume a run, let it do what it announces while that is `lines`, and kill it during the last."""
    command = [sys.executable, str(SCRIPT), str(job), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for line in lines:
            assert child.stdout.readline().strip() == line
            child.stdin.write("\n")
            child.stdin.flush()
        child.kill()
    assert child.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_bit_for_bit_as_an_uninterrupted_one(
    recipe: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    recipe = recipe.override({**EVERYTHING, "threads": 1})
    whole = trained(recipe, data, tmp_path / "whole")
    job, folder = tmp_path / "job.pt", tmp_path / "parts"
    torch.save((recipe.model_dump_json(), vars(data)), job)
    epoch = ["step"] * STEPS + ["save"]
    killed_after(job, folder, *epoch)  # while it writes its first state, or just before or after
    killed_after(job, folder, *epoch, *["step"] * 3)
    partly = make_trainer(recipe, data, folder)
    partly.load()
    assert 1 <= partly.epoch <= 2
    assert partly.best_epoch <= partly.epoch + 1
    assert same(whole, resumed(recipe, data, folder))
