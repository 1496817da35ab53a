"""Every format reads the head that a config describes in the same way."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import load_checkpoint
from tests.model.checkpoint.folders import (
    FOLDERS,
    edit,
    huggingface_folder,
    native_folder,
    put,
    refusal,
    timm_folder,
)
from tests.timm_reference import timm, transformers

pytestmark = pytest.mark.timeout(60)  # libraries of references are imported


def wrapper_folder(folder: Path) -> Path:
    """Write a folder of transformers' wrapper around a network of timm."""
    timm_folder(folder)
    weights = folder / "model.safetensors"
    save_file(
        {f"timm_model.{name}": tensor for name, tensor in load_file(weights).items()}, weights
    )
    put(folder / "config.json", "model_type", "timm_wrapper")
    put(folder / "config.json", "model_args.global_pool", "token")
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "huggingface": huggingface_folder,
    "timm": timm_folder,
    "timm_wrapper": wrapper_folder,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_multi_label_config_has_sigmoids(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path)
    put(folder / "config.json", "problem_type", "multi_label_classification")
    logits = np.array([[3.0, -1.0, 0.5]], np.float32)
    scores = load_checkpoint(str(folder)).head.scores(logits)
    assert scores == pytest.approx(torch.from_numpy(logits).sigmoid().numpy(), abs=1e-6)
    assert not load_checkpoint(str(folder), activation="softmax").multi_label


def test_hidden_characters_of_a_config_are_noted(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    config = folder / "config.json"
    put(config, "label2id", None)
    put(config, "id2label", {"0": "cat\u200b", "1": "dog", "2": "\u06a9\u200c\u06a9"})
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.labels == ("cat", "dog", "\u06a9\u200c\u06a9")
    assert any("labels: 1 had characters that do not print" in note for note in checkpoint.notes)
    put(config, "id2label", {"0": "cat\u200b", "1": "dog", "2": "cat"})
    assert load_checkpoint(str(folder)).labels == ("cat\u200b", "dog", "cat")


@pytest.mark.parametrize("problem", ["regression", "ranking", ["regression"]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_regression_is_refused(kind: str, problem: object, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path)
    put(folder / "config.json", "problem_type", problem)
    message = refusal(folder)
    assert "config.json: problem_type" in message
    assert "VIT_ACTIVATION" in message


def test_wrapper_scores_equal_transformers(tmp_path: Path) -> None:
    library = transformers()
    timm()
    config = library.TimmWrapperConfig(
        architecture="test_vit", num_labels=4, problem_type="multi_label_classification"
    )
    config.pretrained_cfg = {
        "input_size": [3, 160, 160],
        "crop_pct": 0.95,
        "interpolation": "bicubic",
    }
    config.pretrained_cfg |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    model = library.TimmWrapperForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    pixels = torch.randn(2, 3, 160, 160)
    with torch.inference_mode():
        expected = model(pixels).logits.sigmoid()
        logits = checkpoint.build()(pixels).logits
    assert checkpoint.head.scores(logits.numpy()) == pytest.approx(expected.numpy(), abs=1e-5)


def test_activation_must_match_temperature(tmp_path: Path) -> None:
    folder = native_folder(tmp_path / "fitted")
    put(folder / "config.json", "temperature", 2.0)
    assert "fitted with the other activation" in refusal(folder, activation="sigmoid")
    assert load_checkpoint(str(folder), activation="softmax").temperature == 2


@pytest.mark.parametrize("kind", sorted(FOLDERS))
def test_a_setting_changes_what_scores_are(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    own, changed = (
        load_checkpoint(str(folder), activation=activation) for activation in (None, "sigmoid")
    )
    assert changed.head.independent
    assert changed.content != own.content


@pytest.mark.parametrize("kind", FOLDERS)
def test_one_class_has_a_sigmoid(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    head = "classifier" if kind == "huggingface" else "head"
    weights = load_file(folder / "model.safetensors")
    one = {name: tensor[:1].clone() for name, tensor in weights.items() if head in name}
    save_file(weights | one, folder / "model.safetensors")

    def keep_one_class(config: dict[str, Any]) -> None:
        config.update({"labels": ["a"]} if kind == "native" else {})
        config.update({"label_names": ["a"], "num_classes": 1} if kind == "timm" else {})
        config.update({"id2label": {"0": "a"}} if kind == "huggingface" else {})
        if kind == "native":
            config["architecture"]["num_classes"] = 1

    edit(folder / "config.json", keep_one_class)
    checkpoint = load_checkpoint(str(folder))
    scores = checkpoint.head.scores(np.array([[0.0], [-2.0]], np.float32))
    assert scores == pytest.approx(np.array([[0.5], [0.1192]]), abs=1e-4)
    assert "activation: sigmoid, because there is one class" in checkpoint.assumed


def test_two_classes_without_names_are_numbered(tmp_path: Path) -> None:
    library = transformers()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = library.ViTConfig(**sizes, intermediate_size=32, image_size=16, patch_size=8)
    library.ViTForImageClassification(config).save_pretrained(tmp_path)
    library.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.labels == ("LABEL_0", "LABEL_1")
    assert any("--labels FILE (VIT_LABELS)" in note for note in checkpoint.notes)


NAMED = {"0": "a", "1": "b", "2": "c"}
UNNAMED = {f"{index}": f"LABEL_{index}" for index in range(3)}
INDICES = {label: int(index) for index, label in NAMED.items()}


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (
            {"a": 1, "b": 0, "c": 2},
            "label2id has 'a' at 1, where id2label has 'b': correct the wrong one, or name",
        ),
        ({"a": 0, "b": 1, "cat": 2}, "label2id has 'cat' at 2, where id2label has 'c'"),
        ({"a": 0, "b": 1}, "label2id lacks 'c'"),
        ({"a": 0, "b": 1, "c": 7}, "label2id has 'c' at 7, where id2label has 'no class'"),
        ({"a": 0, "b": 1, "c": [2]}, r"label2id has 'c' at \[2\]"),
    ],
)
def test_contradicting_labels_are_refused(
    indices: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = huggingface_folder(tmp_path)
    put(folder / "config.json", "label2id", indices)
    assert re.search(message, refusal(folder))
    assert load_checkpoint(str(folder), labels="numbers").labels == ("0", "1", "2")


@pytest.mark.parametrize(
    "indices", [INDICES, {"a": "0", "b": "1", "c": "2"}, {"LABEL_0": 0, "LABEL_1": 1}, None]
)
def test_agreeing_labels_are_served(indices: dict[str, Any] | None, tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    put(folder / "config.json", "label2id", indices)
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.labels == ("a", "b", "c")
    assert not checkpoint.notes


def test_repeated_labels_are_accepted(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    edit(
        folder / "config.json",
        lambda config: config.update(
            id2label={"0": "crane", "1": "crane", "2": "c"}, label2id={"crane": 1, "c": 2}
        ),
    )
    assert load_checkpoint(str(folder)).labels == ("crane", "crane", "c")


def test_names_in_label2id_alone_are_read(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    edit(folder / "config.json", lambda config: config.update(id2label=UNNAMED, label2id=INDICES))
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.labels == ("a", "b", "c")
    assert any("label2id" in line for line in checkpoint.assumed)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_without_names_are_noted(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path)
    edit(
        folder / "config.json",
        lambda config: config.update(
            {"id2label": UNNAMED}
            if kind == "huggingface"
            else {"label_names": list(UNNAMED.values())}
        ),
    )
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert any("--labels FILE (VIT_LABELS)" in note for note in checkpoint.notes)


def test_another_number_of_labels_is_refused(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    put(folder / "config.json", "num_labels", 7)
    assert "num_labels is 7, but the head has 3 classes" in refusal(folder)
