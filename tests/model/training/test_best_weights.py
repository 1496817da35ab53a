from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.errors import TrainingError
from model.training.loop import Trainer
from model.training.recipe import Recipe
from model.training.run_folder import BEST_FILE, STATE_FILE
from model.training.training_data import TrainingData
from tests.model.training.runs import (
    EVERYTHING,
    Interrupted,
    interrupted_after,
    make_trainer,
    resumed,
    same,
    same_tensors,
    trained,
)

pytestmark = pytest.mark.timeout(120)  # models are trained

OLD_FIELDS = {
    "recipe": "name seed epochs minutes batch_size validation evaluate_every label_smoothing drop_path precision"
    " compile threads architecture initialisation optimiser augmentation patch_dropout",
    "optimiser": "name learning_rate muon_learning_rate betas weight_decay warmup",
    "augmentation": "crop_padding flip trivial_augment",
}
"""Of recipes before best weights were kept."""


def score(
    monkeypatch: pytest.MonkeyPatch, data: TrainingData, accuracies: Sequence[float], margins: Sequence[float]
) -> None:
    """Make each epoch's evaluation find a share of right answers, given with some confidence."""

    def logits(self: Trainer) -> Tensor:
        labels = data.validation_labels
        right = torch.arange(len(labels)) < accuracies[self.epoch] * len(labels)
        answers = torch.where(right, labels, (labels + 1) % 10)
        return margins[self.epoch] * torch.nn.functional.one_hot(answers, 10).float()

    monkeypatch.setattr(Trainer, "validation_logits", logits)


@pytest.mark.parametrize(
    ("accuracies", "margins", "best"),
    [
        ((0.2, 0.5, 0.4, 0.3), (1, 1, 1, 1), 2),
        ((0.2, 0.5, 0.5, 0.5), (1, 1, 2, 1), 3),
        ((0.5, 0.5, 0.5, 0.5), (1, 1, 1, 1), 1),
    ],
    ids=["accuracy", "then the loss", "then the first"],
)
def test_the_best_weights_are_those_of_the_best_validation_epoch(
    recipe: Recipe,
    data: TrainingData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accuracies: tuple[float, ...],
    margins: tuple[float, ...],
    best: int,
) -> None:
    score(monkeypatch, data, accuracies, margins)
    kept: dict[int, dict[str, Tensor]] = {}
    trainer = make_trainer(recipe, data, tmp_path)
    trainer.run(
        lambda row: kept.update({row.epoch: {name: w.clone() for name, w in trainer.weights.items()}}), progress=False
    )
    assert trainer.best_epoch == best
    assert same_tensors(trainer.best_weights, kept[best])
    again = make_trainer(recipe, data, tmp_path)
    again.load()
    assert again.best_epoch == best
    assert same_tensors(again.best_weights, kept[best])
    assert same_tensors(again.weights, kept[4])


def test_before_any_evaluation_the_last_weights_are_the_best(
    recipe: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    recipe = recipe.override(evaluate_every=3)
    interrupted_after(recipe, data, tmp_path, 2)
    trainer = make_trainer(recipe, data, tmp_path)
    trainer.load()
    assert trainer.best_epoch == 2
    assert same_tensors(trainer.best_weights, trainer.weights)


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_run_cut_off_between_its_two_files_goes_on_as_if_it_had_not_been(
    recipe: Recipe, data: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    recipe = recipe.override(EVERYTHING)
    score(monkeypatch, data, (0.2, 0.3, 0.4, 0.1), (1, 1, 1, 1))
    whole = trained(recipe, data, tmp_path / "whole")
    trainer = make_trainer(recipe, data, tmp_path / "parts")
    replace = Path.replace

    def cut_off(self: Path, target: Path) -> Path:
        if target.name == STATE_FILE and trainer.epoch == epoch:
            raise Interrupted
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", cut_off)
        with pytest.raises(Interrupted):
            trainer.run(progress=False)
    assert (tmp_path / "parts" / BEST_FILE).exists()
    if epoch == 1:  # no state yet: started anew
        assert same(whole, trained(recipe, data, tmp_path / "parts"))
    else:
        assert same(whole, resumed(recipe, data, tmp_path / "parts"))


def test_best_weights_of_a_run_that_left_no_state_are_not_taken_for_ones_own(
    recipe: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    trained(recipe, data, tmp_path)
    (tmp_path / STATE_FILE).unlink()
    other = recipe.override(evaluate_every=3)
    interrupted_after(other, data, tmp_path, 1)
    assert not (tmp_path / BEST_FILE).exists()


def test_best_weights_that_are_gone_are_named(recipe: Recipe, data: TrainingData, tmp_path: Path) -> None:
    trained(recipe, data, tmp_path)
    (tmp_path / BEST_FILE).unlink()
    with pytest.raises(TrainingError, match=r"best\.pt"):
        make_trainer(recipe, data, tmp_path).load()


def as_before_best_weights(folder: Path, recipe: Recipe) -> None:
    """Make a state what earlier versions wrote: no best weights, no fields that are younger."""
    state = torch.load(folder / STATE_FILE, weights_only=True)
    del state["has_best"]
    values = recipe.model_dump(mode="json")
    for table in ("optimiser", "augmentation"):
        values[table] = {name: values[table][name] for name in OLD_FIELDS[table].split()}
    state["recipe"] = json.dumps({name: values[name] for name in OLD_FIELDS["recipe"].split()})
    torch.save(state, folder / STATE_FILE)
    (folder / BEST_FILE).unlink(missing_ok=True)


@pytest.mark.parametrize("evaluate_every", [1, 2])
def test_a_state_from_before_best_weights_goes_on_from_its_last_ones(
    recipe: Recipe, data: TrainingData, tmp_path: Path, evaluate_every: int
) -> None:
    recipe = recipe.override(evaluate_every=evaluate_every)
    whole = trained(recipe, data, tmp_path / "whole")
    interrupted_after(recipe, data, tmp_path / "old", 3)
    as_before_best_weights(tmp_path / "old", recipe)
    loaded = make_trainer(recipe, data, tmp_path / "old")
    loaded.load()
    assert loaded.best_epoch == 3
    assert same_tensors(loaded.best_weights, loaded.weights)
    loaded.run(progress=False)
    assert same_tensors(loaded.weights, whole.weights)
    again = make_trainer(recipe, data, tmp_path / "old")
    again.load()
    assert again.best_epoch == loaded.best_epoch
    assert same_tensors(again.best_weights, loaded.best_weights)


def test_a_state_of_a_recipe_with_fields_that_nobody_knows_is_refused(
    recipe: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    trained(recipe.override(epochs=1), data, tmp_path)
    state = torch.load(tmp_path / STATE_FILE, weights_only=True)
    state["recipe"] = state["recipe"].replace('"seed":', '"speed":1,"seed":', 1)
    torch.save(state, tmp_path / STATE_FILE)
    with pytest.raises(TrainingError, match=r"last\.pt: recipe: .*speed"):
        make_trainer(recipe.override(epochs=1), data, tmp_path).load()
