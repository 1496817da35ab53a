from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model.data.cifar10 import CLASSES
from model.errors import TrainingError
from model.network.layers.patch_embed import ConvStem
from model.training import loop
from model.training.recipe import Recipe
from model.training.run_folder import CARD_FILE, TEACHER_FILE
from model.training.teacher import TeacherTrainer
from model.training.train import run
from model.training.training_data import TrainingData
from tests.model.training.runs import CPU, interrupted_after, make_trainer, resumed, same, trained

pytestmark = pytest.mark.timeout(120)  # models are trained


@pytest.fixture
def taught(recipe: Recipe) -> Recipe:
    """Two epochs of a tiny teacher, then two of the model."""
    teacher = {"epochs": 2, "batch_size": 80, "widths": (24, 16, 16), "resample": 0.2}
    distillation = {"weight": 0.8, "temperature": 2.0}
    return recipe.override(epochs=2, teacher=teacher, distillation=distillation)


def teacher_of(recipe: Recipe, data: TrainingData, folder: Path) -> TeacherTrainer:
    return TeacherTrainer(recipe, data, CLASSES, folder, CPU, torch.float32)


def test_the_teacher_learns_and_then_answers_alike_whatever_the_batch(
    taught: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    teacher = teacher_of(taught.override({"teacher.epochs": 6}), data, tmp_path)
    record = teacher.run()
    assert record.validation_accuracy > 0.6
    assert record.seconds > 0
    assert record.cpu_seconds > 0
    pixels = data.normalise(data.validation_pixels[:8])
    answers = teacher.logits(pixels)
    torch.testing.assert_close(teacher.logits(pixels[:3]), answers[:3])
    right = answers.argmax(dim=1) == data.validation_labels[:8]
    assert right.float().mean() > 0.5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_that_is_interrupted_in_the_teacher_or_after_it_ends_bit_for_bit_alike(
    taught: Recipe, data: TrainingData, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = taught.override(precision=precision)
    whole, save = trained(taught, data, tmp_path / "whole"), TeacherTrainer._save

    def interrupted_save(teacher: TeacherTrainer) -> None:
        save(teacher)
        raise KeyboardInterrupt

    parts = tmp_path / "parts"
    teacher_of(taught, data, tmp_path)  # draws numbers, as another run of this process would
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TeacherTrainer, "_save", interrupted_save)
        trained(taught, data, parts)
    assert [path.name for path in parts.iterdir()] == [TEACHER_FILE]
    interrupted_after(taught, data, parts, 1)
    again = resumed(taught, data, parts)
    assert same(whole, again)
    assert again.teacher is not None
    assert whole.teacher is not None
    assert again.teacher.validation_accuracy == whole.teacher.validation_accuracy


def test_the_loss_is_that_of_the_labels_mixed_with_the_divergence_from_the_teachers_scores(
    taught: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    trainer = make_trainer(taught, data, tmp_path)
    generator = torch.Generator().manual_seed(1)
    logits, answers = (3 * torch.randn(5, CLASSES, generator=generator) for _ in range(2))
    mixed = trainer._distilled(torch.tensor(7.0), logits, answers)
    scores, taught_scores = (logits / 2).softmax(dim=1), (answers / 2).softmax(dim=1)
    divergence = (taught_scores * (taught_scores / scores).log()).sum(dim=1).mean() * 4
    assert mixed.item() == pytest.approx(0.2 * 7 + 0.8 * divergence.item(), rel=1e-5)
    assert trainer._distilled(torch.tensor(0.0), logits, logits).item() == pytest.approx(0, abs=1e-6)


def test_a_teacher_alone_can_teach_whatever_the_labels_say(
    taught: Recipe, data: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    class Oracle(TeacherTrainer):
        def logits(self, pixels: torch.Tensor) -> torch.Tensor:
            seen.append(pixels)
            return 10 * F.one_hot(torch.zeros(len(pixels), dtype=torch.int64), CLASSES).float()

    monkeypatch.setattr(loop, "TeacherTrainer", Oracle)
    trainer = make_trainer(taught.override({"distillation.weight": 1.0, "teacher.epochs": 1}), data, tmp_path)
    monkeypatch.setattr(Oracle, "_validate", lambda _: 0.0)
    trainer.run(progress=False)
    assert (trainer.validation_logits().argmax(dim=1) == 0).all()
    assert seen[0].shape == (taught.batch_size, 3, 32, 32)
    assert not torch.equal(seen[0], seen[-1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"distillation": None}, "teacher and distillation need each other"),
        ({"teacher": None}, "teacher and distillation need each other"),
        ({"teacher.widths": (8, 8, 8)}, r"teacher\.widths"),
        ({"distillation.weight": 0.0}, r"distillation\.weight"),
        ({"distillation.temperature": 0.0}, r"distillation\.temperature"),
        ({"teacher.resample": 1.5}, r"teacher\.resample"),
        ({"distillation.inherit_stem": True}, "need an architecture.conv_stem"),
        ({"distillation.frozen_stem": 0.5}, "need an architecture.conv_stem"),
    ],
)
def test_a_recipe_with_half_a_teacher_is_refused(taught: Recipe, fields: dict[str, object], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        taught.override(fields)


STEM = {
    "widths": (24, 24, 24, 16, 16),
    "kernels": (3, 3, 3, 3, 3),
    "strides": (1, 1, 1, 1, 1),
    "pools": (1, 2, 1, 2, 1),
    "activation": "gelu",
}


@pytest.fixture
def inheriting(taught: Recipe) -> Recipe:
    """The model's stem is the teacher's first layers; it is frozen in the first of two epochs."""
    return taught.override(
        {"architecture.conv_stem": STEM, "distillation.inherit_stem": True, "distillation.frozen_stem": 0.5}
    )


def test_a_stem_that_starts_as_the_teachers_first_layers_gives_their_features(
    inheriting: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    teacher = teacher_of(inheriting, data, tmp_path)
    teacher.run()
    config = inheriting.architecture.config((32, 32), CLASSES).conv_stem if inheriting.architecture else None
    assert config is not None
    stem = ConvStem(config, 3)
    stem.load_state_dict(teacher.stem_weights(config))
    pixels = data.normalise(data.validation_pixels[:8])
    with torch.no_grad():
        net = teacher.net
        expected = net.groups[:2](F.gelu(net.whitening(pixels)))
        features = stem(pixels)
    assert expected.shape == (8, 16, 7, 7)
    assert features.shape == (8, 16, 8, 8)  # the stem sees the row and the column that the teacher leaves out
    torch.testing.assert_close(features[:, :, :5, :5], expected[:, :, :5, :5], atol=1e-4, rtol=1e-4)


def test_a_frozen_stem_stays_the_teachers_until_its_share_of_the_schedule_is_over_bit_for_bit_after_a_resumption(
    inheriting: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    inheriting = inheriting.override(epochs=4)
    whole = trained(inheriting, data, tmp_path / "whole")
    interrupted_after(inheriting, data, tmp_path / "broken", 1)
    broken = make_trainer(inheriting, data, tmp_path / "broken")
    broken.load()
    teacher = teacher_of(inheriting, data, tmp_path / "broken")
    teacher.run()
    assert broken.config.conv_stem is not None
    for name, weight in teacher.stem_weights(broken.config.conv_stem).items():
        assert torch.equal(broken.weights[f"patch_embed.backbone.{name}"], weight)
        assert not torch.equal(whole.weights[f"patch_embed.backbone.{name}"], weight)
    broken.run(progress=False)
    assert same(whole, broken)


def test_a_stem_of_other_layers_than_the_teachers_is_refused_before_training(
    inheriting: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    for field, value in {"widths": (24, 24, 24, 16, 8), "pools": (1, 1, 2, 2, 1), "activation": "relu"}.items():
        with pytest.raises(TrainingError, match=r"inherit_stem: architecture\.conv_stem is .*; the teacher has "):
            make_trainer(inheriting.override({f"architecture.conv_stem.{field}": value}), data, tmp_path)


def test_data_that_the_teacher_cannot_learn_from_are_refused_before_training(
    taught: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"teacher\.batch_size: there are only 320 training images"):
        make_trainer(taught.override({"teacher.batch_size": 321}), data, tmp_path)
    tiny = replace(data, pixels=data.pixels[..., :8, :8], validation_pixels=data.validation_pixels[..., :8, :8])
    with pytest.raises(TrainingError, match="teacher: pictures of 8x8 pixels are too small, at least 9x9"):
        teacher_of(taught, tiny, tmp_path)


def test_the_state_of_another_teacher_is_refused_but_the_model_may_change(
    taught: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    first = teacher_of(taught, data, tmp_path).run()
    other = taught.override({"epochs": 7, "optimiser.learning_rate": 1e-3, "distillation.weight": 0.5})
    assert teacher_of(other, data, tmp_path).run() == first
    with pytest.raises(TrainingError, match=r"teacher\.pt: made with another recipe"):
        teacher_of(taught.override({"teacher.epochs": 3}), data, tmp_path)
    with pytest.raises(TrainingError, match=r"teacher\.pt: made with another recipe"):
        teacher_of(taught.override(seed=9), data, tmp_path)


def test_a_run_goes_on_with_the_teacher_that_is_there_and_tells_of_it(
    cifar: Path, data: TrainingData, tmp_path: Path, taught: Recipe
) -> None:
    out = tmp_path / "run"
    teacher = teacher_of(taught, data, out).run()
    result = run(cifar, out, taught, device="cpu", progress=False)
    assert result.teacher == teacher
    assert result.cpu_seconds > teacher.cpu_seconds > 0
    assert result.seconds > teacher.seconds
    record = json.loads((out / "config.json").read_text())["training"]
    assert record["teacher"]["validation_accuracy"] == teacher.validation_accuracy
    card = " ".join((out / CARD_FILE).read_text().split())
    assert f"teacher of {teacher.parameters:,} parameters" in card
    assert f"{teacher.validation_accuracy:.2%}" in card
