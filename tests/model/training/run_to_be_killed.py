"""Train in a process of its own, announce each step and each save, and begin it when a line comes in.

Arguments: a file that holds (recipe as JSON, data) as `torch.save` wrote them, and the run's folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from model.training.loop import Trainer
from model.training.recipe import Recipe
from model.training.run_folder import STATE_FILE
from model.training.training_data import TrainingData
from tests.model.training.runs import make_trainer


def announce(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()
    sys.stdin.readline()


def main(job: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    step, save = Trainer._step, Trainer.save

    def told_step(self: Trainer, pixels: Tensor, labels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        announce("step")
        return step(self, pixels, labels, targets)

    def told_save(self: Trainer) -> None:
        announce("save")
        save(self)

    Trainer._step, Trainer.save = told_step, told_save  # type: ignore[method-assign]
    recipe, data = torch.load(job, weights_only=True)
    trainer = make_trainer(Recipe.model_validate_json(recipe), TrainingData(**data), folder)
    if (folder / STATE_FILE).exists():
        trainer.load()
    trainer.run(progress=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
