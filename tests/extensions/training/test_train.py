import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import model
from model.checkpoint import load_checkpoint
from model.errors import DatasetError, TrainingError
from model.extensions.evaluation import cifar10
from model.extensions.evaluation.cifar10 import CLASSES, IMAGE_SIZE
from model.extensions.evaluation.evaluate import measure, predict_logits
from model.extensions.training.recipe import RECIPES, Recipe, read_recipe
from model.extensions.training.run_folder import CARD_FILE, RECIPE_FILE
from model.extensions.training.train import default_recipe, run
from model.network.vit import VisionTransformer, count_parameters
from model.runtime.predictor import Predictor
from tests.extensions.conftest import tiny_recipe
from tests.extensions.evaluation.scores import predict_scores
from tests.extensions.training.synthetic import LABELS, write_cifar

pytestmark = pytest.mark.timeout(120)  # models are trained


def short_recipe() -> Recipe:
    """A recipe so short that some answers are wrong."""
    return tiny_recipe().override(epochs=2)


@pytest.fixture
def recipe() -> Recipe:
    return short_recipe()


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a finished run, which tests must not change, and its record."""
    folder = tmp_path_factory.mktemp("finished")
    torch.set_num_threads(1)  # like the other tests
    out = folder / "run"
    return out, run(write_cifar(folder / "cifar"), out, short_recipe(), device="cpu")


@pytest.fixture
def finished(
    finished_once: tuple[Path, dict[str, Any]], tmp_path: Path
) -> tuple[Path, dict[str, Any]]:
    out, record = finished_once
    return shutil.copytree(out, tmp_path / "run"), record


def test_a_trained_folder_scores_as_reported(
    finished: tuple[Path, dict[str, Any]], cifar: Path
) -> None:
    out, record = finished
    checkpoint = load_checkpoint(str(out))
    assert (checkpoint.labels, checkpoint.name) == (LABELS, "tiny")
    assert checkpoint.temperature == record["temperature"] != 1.0
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {
        torch.float16
    }
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    images = cifar10.read(cifar, cifar10.TEST_FILES)
    scores = predict_scores(
        Predictor(checkpoint, device="cpu", compile_mode="off", dtype="float32"), images.pixels
    )
    measured = measure(scores, images.labels, checkpoint.labels)
    assert measured.count == 100
    assert measured.accuracy == record["test"]["accuracy"] > 0.5
    assert measured.loss == pytest.approx(record["test"]["loss"], rel=1e-4)


def test_accuracy_tells_images_trained_on(
    cifar: Path, tmp_path: Path, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copyfile(cifar / cifar10.TRAIN_FILES[0], cifar / cifar10.TEST_FILES[0])
    caplog.set_level("INFO")
    run(cifar, tmp_path / "run", recipe.override(epochs=1), device="cpu")
    assert re.search(r"images, of which \d+ were trained on, after", caplog.text)


def test_calibration_uses_validation_images(
    finished: tuple[Path, dict[str, Any]], cifar: Path
) -> None:
    out, record = finished
    calibration = load_checkpoint(str(out)).calibration
    assert calibration is not None
    assert calibration.temperature == record["temperature"]
    assert calibration.pictures == len(calibration.scores) == record["validation"]["count"]
    assert np.mean(np.greater(calibration.scores, 0.5)) == pytest.approx(
        record["validation"]["accuracy"], abs=0.1
    )
    # Energies use the network's logits. Energies of log-probabilities would be near 0 and carry no
    # information.
    predictor = Predictor(
        load_checkpoint(str(out)), device="cpu", compile_mode="off", dtype="float32"
    )
    logits = predict_logits(predictor, cifar10.read(cifar, cifar10.TEST_FILES).pixels)
    energies = np.log(np.exp(logits / calibration.temperature).sum(axis=1))
    assert np.median(calibration.energies) == pytest.approx(np.median(energies), rel=0.2)
    assert np.std(energies) > 0.01


def test_the_card_tells_what_was_measured(
    finished: tuple[Path, dict[str, Any]], recipe: Recipe
) -> None:
    out, record = finished
    assert json.loads((out / "config.json").read_text())["training"] == record
    assert Recipe.model_validate(record["recipe"]) == recipe == read_recipe(out / RECIPE_FILE)
    assert (record["images"], record["validation_images"]) == (320, 80)
    card = (out / CARD_FILE).read_text()
    for told in (
        f"{record['test']['accuracy']:.2%}",
        f"{record['parameters']:,}",
        *LABELS,
        torch.__version__,
        "seed 3",
    ):
        assert told in card


def test_unusable_data_are_told_first(cifar: Path, tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(TrainingError, match="batch_size 321: there are only 320 training images"):
        run(cifar, tmp_path / "run", recipe.override(batch_size=321), device="cpu")
    with pytest.raises(
        TrainingError, match="neither an architecture to train from scratch nor a checkpoint"
    ):
        run(cifar, tmp_path / "run", recipe.override(architecture=None), device="cpu")
    (cifar / "test_batch.bin").write_bytes(b"\xff" * 3072)
    with pytest.raises(DatasetError, match=r"test_batch\.bin: 3072 bytes"):
        run(cifar, tmp_path / "run", recipe, device="cpu")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_filled_folder_is_not_overwritten(
    finished: tuple[Path, dict[str, Any]], cifar: Path, tmp_path: Path, recipe: Recipe
) -> None:
    out, _ = finished
    with pytest.raises(TrainingError, match="holds a run already"):
        run(cifar, out, recipe, device="cpu")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(TrainingError, match="nothing to resume"):
        run(cifar, other, recipe, resume=True, device="cpu")
    (other / "config.json").write_text("{}")
    with pytest.raises(
        TrainingError, match=r"other: is not empty \(config\.json\); choose another folder"
    ):
        run(cifar, other, recipe, device="cpu")
    with pytest.raises(TrainingError, match="is inside the data"):
        run(cifar, cifar / "out", recipe, device="cpu")
    assert [path.name for path in other.iterdir()] == ["config.json"]
    assert not (cifar / "out").exists()


ROOT = Path(__file__).resolve().parents[3]
BUNDLED = Path(model.__file__).parent / "weights" / "cifar10"
MINIMAL = """
name = "x"
epochs = 2
batch_size = 8
[architecture]
patch_size = 8
width = 32
depth = 1
heads = 2
mlp_width = 64
[optimiser]
learning_rate = 1e-3
"""


def test_bundled_checkpoint_fits_its_recipe() -> None:
    recipe = read_recipe(RECIPES / "cifar10.toml")
    assert recipe.architecture is not None
    config = recipe.architecture.config(IMAGE_SIZE, CLASSES)
    assert count_parameters(VisionTransformer(config)) <= 6_000_000
    assert config.attention_source == "cls"
    # The record has fields that recipes have lost, and the teacher's fields in two tables.
    record = json.loads((BUNDLED / "config.json").read_text())["training"]["recipe"]
    record["teacher"] |= record["distillation"]

    def holds(today: dict[str, Any], then: dict[str, Any]) -> bool:
        return all(
            holds(v, then[k]) if isinstance(v, dict) else then[k] == v for k, v in today.items()
        )

    assert holds(recipe.model_dump(mode="json"), record)


def test_a_recipe_is_read_without_torch() -> None:
    code = "import sys, model.extensions.training.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_survives_its_record(path: Path, tmp_path: Path) -> None:
    recipe = read_recipe(path).override(name='a "strange" näme')
    record = tmp_path / "recipe.json"
    record.write_text(recipe.model_dump_json(), encoding="utf-8")
    assert read_recipe(record) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "speed = 1\n", "optimiser.speed"),
        (MINIMAL.replace("epochs = 2\n", ""), "epochs: Field required"),
        (MINIMAL.replace("1e-3", "-1.0"), "optimiser.learning_rate"),
        (MINIMAL.replace("1e-3", "inf"), "optimiser.learning_rate"),
        (MINIMAL.replace("\nwidth = 32", "\nwidth = 30"), "architecture.width"),
        (MINIMAL.replace("= 8\nwidth", "= \nwidth"), "not a recipe"),
    ],
    ids=[
        "unknown field",
        "missing field",
        "negative rate",
        "infinite rate",
        "odd width",
        "no TOML",
    ],
)
def test_a_bad_recipe_names_its_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(TrainingError, match=message) as caught:
        read_recipe(path)
    assert "bad.toml" in str(caught.value)
    with pytest.raises(TrainingError, match=r"none\.toml"):
        read_recipe(tmp_path / "none.toml")


def test_an_override_keeps_other_fields(recipe: Recipe) -> None:
    changed = recipe.override(
        {"optimiser.learning_rate": 1e-4, "mixing.cutmix": 1.0, "epochs": 2}, seed=8
    )
    assert changed.optimiser == recipe.optimiser.model_copy(update={"learning_rate": 1e-4})
    assert changed.mixing.cutmix == 1.0
    assert (changed.epochs, changed.seed) == (2, 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("speed", "speed"),
        ("optimiser.speed", r"optimiser\.speed"),
        ("wheels.count", "wheels"),
        ("epochs.count", r"epochs\.count: epochs is not a table"),
        ("optimiser.learning_rate", r"optimiser\.learning_rate"),
        ("optimizer.learning_rate", r"unknown name; near it are optimiser\."),
        ("optimiser.lr", r"unknown name; available: .*\boptimiser.learning_rate\b"),
        ("learning_rte", r"unknown name; near it are .*\boptimiser.learning_rate, "),
        ("validation", "^recipe: validation: expected a number of images, 1 or more, or a share"),
    ],
)
def test_an_invalid_override_is_refused(recipe: Recipe, name: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        recipe.override({name: -1})


def test_an_unfit_architecture_is_refused(recipe: Recipe) -> None:
    assert recipe.architecture is not None
    with pytest.raises(TrainingError, match="not a multiple of patch_size 8"):
        recipe.architecture.config((30, 32), 10)


def test_the_data_choose_the_default_recipe(cifar: Path) -> None:
    assert default_recipe(cifar, None).stem == "cifar10"
    assert default_recipe(cifar, "bundled").stem == "finetune"
