from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.evaluation.evaluate import Evaluation, measure
from model.network.vit import VisionTransformer
from model.training.recipe import Recipe
from model.training.report.figures import write_figures
from model.training.report.model_card import model_card, with_robustness
from model.training.run_folder import EpochMetrics
from model.training.run_record import RunRecord

LABELS = ("cat", "dog", "bird")
FIGURES = ("confusion_matrix.png", "calibration.png", "learning_curve.png")


def evaluation(classes: int = 3, labels: tuple[str, ...] = LABELS) -> Evaluation:
    generator = np.random.default_rng(0)
    scores = generator.dirichlet(np.ones(classes), 60).astype(np.float32)
    return measure(scores, generator.integers(0, classes, 60), labels)


def checkpoint(labels: tuple[str, ...] = LABELS) -> Checkpoint:
    config = ViTConfig(
        image_size=(16, 24), patch_size=8, width=8, depth=1, heads=1, mlp_width=8, num_classes=len(labels)
    )
    preprocess = PreprocessConfig(
        size=(16, 24),
        resize="squash",
        resize_size=(16, 24),
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
    return Checkpoint(
        "birds", "m", "vitserve", "vit", config, preprocess, labels, VisionTransformer(config).state_dict()
    )


@pytest.fixture
def finished(recipe: Recipe) -> RunRecord:
    measured = evaluation()
    return RunRecord(
        recipe=recipe,
        data="CIFAR-10",
        started_from=None,
        kept_epoch=3,
        epochs=4.0,
        images=400,
        validation_images=80,
        seconds=90.0,
        cpu_seconds=150.0,
        teacher=None,
        device="a slow machine",
        precision="float32",
        parameters=1234567,
        versions={"torch": "9.9"},
        temperature=1.125,
        validation=measured,
        validation_uncalibrated=measured,
        test=replace(measured, accuracy=0.4321, count=60),
        test_uncalibrated=measured,
    )


def history() -> Iterator[EpochMetrics]:
    for epoch in range(1, 5):
        tested = epoch % 2 == 0
        yield EpochMetrics(
            epoch, 400, 1e-3, 2.0 / epoch, 0.2 * epoch, 1.5 if tested else None, 0.5 if tested else None, 100.0, 9.0
        )


def test_a_card_tells_data_recipe_seed_device_time_accuracy_and_what_it_is_not_for(finished: RunRecord) -> None:
    card = model_card(finished, checkpoint())
    for told in (
        "**43.21%** of 60 images",
        "Must not be used for",
        "cs.toronto.edu/~kriz",
        "states no licence",
        "400 of 480 images were trained on",
        "read once, when weights, recipe and temperature were fixed",
        "seed 3",
        "after epoch 3 are kept",
        "a slow machine; torch 9.9",
        "1.5 minutes",
        "2.5 minutes of CPU time",
        "temperature 1.125",
        "Muon for the blocks' matrices at 0.005",
    ):
        assert told in " ".join(card.split())
    for label, accuracy in finished.test.per_class.items() if finished.test else ():
        assert f"| {label} | {accuracy:.1%} |" in card
    assert "](figures/" not in card


def test_the_templates_are_part_of_the_package() -> None:
    root = Path(__file__).resolve().parents[4]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed = {path for pattern in settings["package-data"]["model"] for path in (root / "model").glob(pattern)}
    folder = root / "model" / "training" / "report"
    assert {folder / f"{name}.md.jinja" for name in ("model_card", "robustness")} <= packed


def test_what_looks_like_a_template_in_a_name_is_not_filled_in(finished: RunRecord) -> None:
    run = replace(finished, data="{{ 7 * 7 }}", started_from="{{ 7 * 7 }}")
    card = model_card(run, replace(checkpoint(("{{ 7 * 7 }}", "{% if %}", "$name")), name="{{ 7 * 7 }}"))
    assert card.startswith("# {{ 7 \\* 7 }}\n")
    assert "fine-tuned from `{{ 7 * 7 }}` on\n`{{ 7 * 7 }}`: {{ 7 \\* 7 }}, {% if %}, $name." in card


def test_a_card_of_a_folder_without_test_images_claims_none(finished: RunRecord) -> None:
    run = replace(finished, data="birds", started_from="google/vit-base", test=None, test_uncalibrated=None)
    card = " ".join(model_card(run, checkpoint()).split())
    assert "There were no test images" in card
    assert f"Validation accuracy (top-1) | **{run.validation.accuracy:.2%}**" in card
    assert "fine-tuned from `google/vit-base`" in card
    assert "| Test" not in card
    assert "**Test" not in card
    assert "Krizhevsky" not in card
    assert "--recipe recipe.toml" in card


def test_what_a_recipe_switches_on_is_told_and_what_it_leaves_off_is_not(finished: RunRecord, recipe: Recipe) -> None:
    plain = model_card(finished, checkpoint())
    changes = {
        "ema_decay": 0.999,
        "label_smoothing": 0.05,
        "patch_dropout.rate": 0.5,
        "augmentation.trivial_augment": 0.25,
        "augmentation.erasing": 0.125,
        "mixing.cutmix": 1.0,
        "optimiser.layer_decay": 0.75,
        "optimiser.clip_norm": 2.0,
    }
    full = model_card(replace(finished, recipe=recipe.override(changes)), checkpoint())
    for told in ("EMA, 0.999", "label smoothing", "PatchDropout", "TrivialAugment", "erasing", "CutMix", "clipped"):
        assert told.lower() in full.lower()
        assert told.lower() not in plain.lower()


def test_many_classes_are_a_table_of_the_worst(finished: RunRecord) -> None:
    labels = tuple(f"class {number}" for number in range(150))
    measured = replace(evaluation(), per_class={label: i / 150 for i, label in enumerate(labels)})
    card = model_card(replace(finished, test=measured), checkpoint(labels))
    assert "| class 0 | 0.0% |" in card
    assert "| class 149 |" not in card
    assert len(card.splitlines()) < 150


def test_figures_are_drawn_and_linked(finished: RunRecord, tmp_path: Path) -> None:
    assert finished.test is not None
    drawn = write_figures(tmp_path, finished.test, LABELS, list(history()))
    assert drawn == FIGURES
    card = model_card(finished, checkpoint(), drawn)
    for name in FIGURES:
        assert f"](figures/{name})" in card
        assert (tmp_path / "figures" / name).read_bytes().startswith(b"\x89PNG")
    rows = (tmp_path / "figures" / "confusion_matrix.csv").read_text().splitlines()
    assert rows[0] == "truth,cat,dog,bird"
    assert [int(n) for n in rows[1].split(",")[1:]] == list(finished.test.confusion[0])


def test_without_matplotlib_there_is_a_card_without_pictures(
    finished: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert finished.test is not None
    monkeypatch.setattr("model.training.report.figures.available", lambda: False)
    assert write_figures(tmp_path, finished.test, LABELS, list(history())) == ()
    assert "pip install -c constraints.txt -e '.[figures]'" in caplog.text
    assert [file.name for file in (tmp_path / "figures").iterdir()] == ["confusion_matrix.csv"]


def test_robustness_is_written_into_a_card_once(finished: RunRecord) -> None:
    card = model_card(finished, checkpoint())
    first = with_robustness(card, {"as stored": 0.9, "turned": 0.885}, 10_000)
    assert "| turned | 88.50% | -1.50 |" in first
    assert first.index("## Robustness") < first.index("## Licence")
    again = with_robustness(first, {"as stored": 0.8, "turned": 0.81}, 10_000)
    assert again.count("## Robustness") == again.count("## Licence") == 1
    assert "| turned | 81.00% | +1.00 |" in again
    assert "88.50%" not in again
    assert with_robustness(first, {"as stored": 0.9, "turned": 0.885}, 10_000) == first
    assert with_robustness("# A card\n", {"as stored": 0.9}, 10).startswith("# A card\n\n## Robustness\n")


def test_a_temperature_that_was_not_fitted_is_not_claimed(finished: RunRecord) -> None:
    card = model_card(replace(finished, temperature=1.0), checkpoint())
    assert "No temperature was fitted" in card
    assert "fitted on the validation" not in card
    assert "for fitting the temperature" not in card
    assert card.count("| Validation") == card.count("| **Test**") == 1
