"""Networks of timm's other families, which timm builds and the service runs as they are."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import Checkpoint, load_checkpoint, native
from model.config import LibraryConfig
from model.errors import CheckpointError, InputError
from model.network import library
from model.outputs import RequestedOutputs
from model.parameters import methods_of, parse_embedding, parse_maps
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise
from tests.model.checkpoint.folders import edit, edit_tensors
from tests.model.checkpoint.parity import (
    EXACT,
    pictures,
    randomise,
    relative_error,
)
from tests.model.runtime.predictions import MODES
from tests.timm_reference import timm, transformers

pytestmark = pytest.mark.timeout(60)  # imports timm


SMALL: dict[str, Any] = {"depths": (1, 1, 1, 1)}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet-tested": ("test_resnet", {"global_pool": "max"}),
    "convnext": ("convnext_atto", {**SMALL, "dims": (8, 8, 16, 16), "drop_path_rate": 0.5}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": 56,
            "embed_dim": 16,
            "depths": (2, 1),
            "num_heads": (2, 2),
            "strict_img_size": True,
        },
    ),
    "swin-v2": (
        "swinv2_tiny_window8_256",
        {"img_size": (64, 32), "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2)},
    ),
    "efficientnet": ("test_efficientnet", {"drop_rate": 0.5}),
    "cait": ("cait_xxs24_224", {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2}),
}
FIXED = {"swin", "swin-v2", "cait"}
"""Families whose input size is an argument; others accept any size, here a small one."""


def make_library(family: str, folder: Path) -> Any:
    """Save a random network of a family as timm does, and return it in evaluation mode."""
    name, arguments = FAMILIES[family]
    torch.manual_seed(0)
    channels = arguments.get("in_chans", 3)
    small = (
        {"pretrained_cfg_overlay": {"input_size": (channels, 64, 96)}}
        if family not in FIXED
        else {}
    )
    model = timm().create_model(name, num_classes=5, **small, **arguments).eval()
    randomise(model)
    for name, statistic in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            torch.nn.init.uniform_(statistic, 0.5, 2)
    labels = {"label_names": [f"n{i}" for i in range(5)]}
    timm().models.save_for_hf(model, folder, model_config=labels, safe_serialization=True)
    return model


def edited(folder: Path, **changes: Any) -> Path:
    """Change fields of the folder's config; add fields to `model_args` and `pretrained_cfg`."""

    def change(config: dict[str, Any]) -> None:
        for key, value in changes.items():
            config[key] = {**(config.get(key) or {}), **value} if isinstance(value, dict) else value

    edit(folder / "config.json", change)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small ConvNeXt; tests copy it."""
    folder = tmp_path_factory.mktemp("convnext")
    make_library("convnext", folder)
    return folder


def assert_same(checkpoint: Checkpoint, model: Any, what: str) -> None:
    """Compare logits and embeddings of the network and of timm's module."""
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        expected = model(pixels)
        output = checkpoint.network()(pixels)
        features = model.forward_head(model.forward_features(pixels), pre_logits=True)
    assert expected.std() > 1e-3, "the reference says nothing"
    error = relative_error(output.logits, expected)
    print(f"parity timm's own {what}: {error:.1e}")  # noqa: T201 - for the table in the documentation
    assert error < EXACT
    assert checkpoint.config.width == features.shape[1]
    assert relative_error(output.embeddings["head"], features) < EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_library_networks_equal_timms(family: str, tmp_path: Path) -> None:
    model = make_library(family, tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    config = checkpoint.config
    assert isinstance(config, LibraryConfig)
    assert (config.architecture, config.library, config.num_classes) == (
        FAMILIES[family][0],
        "timm",
        5,
    )
    assert_same(checkpoint, model, family)


def test_a_head_without_a_bias_gets_zeros(tmp_path: Path) -> None:
    model = make_library("convnext", tmp_path)
    torch.nn.init.zeros_(model.head.fc.bias)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("head.fc.bias"))
    checkpoint = load_checkpoint(str(tmp_path))
    assert_same(checkpoint, model, "head without a bias")
    assert "head: a layer without a bias, because the file has none" in checkpoint.assumed


def test_a_converted_network_equals_timms(tmp_path: Path) -> None:
    model = make_library("swin", tmp_path)
    native.write(tmp_path / "native", load_checkpoint(str(tmp_path)), dtype=torch.float32)
    assert_same(load_checkpoint(str(tmp_path / "native")), model, "swin, converted")


@pytest.mark.parametrize(("family", "backend"), [("resnet-tested", "torch"), ("swin", "openvino")])
def test_a_predictor_answers_alike(family: str, backend: Any, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    model = make_library(family, tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    predictor = Predictor(
        checkpoint,
        device="cpu",
        dtype="float32",
        compile_mode=MODES[backend],
        max_batch=4,
        streams=1,
    )
    assert predictor.backend.startswith(backend)
    images = np.random.default_rng(0).integers(
        0, 256, (3, *checkpoint.config.image_size, 3), np.uint8
    )
    with torch.inference_mode():
        expected = model(Normalise(checkpoint.preprocess)(torch.from_numpy(images)))
    outputs = predictor.predict(images, RequestedOutputs(2, logits=True))
    found = torch.from_numpy(np.stack([each.logits for each in outputs if each.logits is not None]))
    assert relative_error(found, expected) < EXACT


def test_a_wrapper_without_a_head_is_read(tmp_path: Path) -> None:
    hub = transformers()
    pretrained = timm().create_model("vit_tiny_patch16_224", depth=1).pretrained_cfg
    config = hub.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",
        model_args={"img_size": 48, "depth": 1},
        pretrained_cfg=pretrained | {"input_size": (3, 48, 48)},
    )
    model = hub.TimmWrapperModel(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        expected = model(pixels).pooler_output
        got = checkpoint.build()(pixels, (), 0, True).embeddings["head"]
    assert relative_error(got, expected) < EXACT


def test_a_wrapper_of_transformers_is_read(tmp_path: Path) -> None:
    model = make_library("convnext", tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file(
        {f"timm_model.{name}": tensor for name, tensor in load_file(weights).items()}, weights
    )
    assert_same(load_checkpoint(str(edited(tmp_path, model_type="timm_wrapper"))), model, "wrapped")


def test_library_network_takes_another_size(tmp_path: Path) -> None:
    model = make_library("resnet-tested", tmp_path / "free")
    checkpoint = load_checkpoint(str(tmp_path / "free"), image_size=(96, 64))
    assert checkpoint.preprocess.size == checkpoint.config.image_size == (96, 64)
    assert_same(checkpoint, model, "another size")
    make_library("swin", tmp_path / "fixed")
    with pytest.raises(
        CheckpointError, match="timm's swin_tiny_patch4_window7_224 is made for 56x56"
    ):
        load_checkpoint(str(tmp_path / "fixed"), image_size=(112, 112))


def test_library_network_has_one_embedding(small: Path) -> None:
    checkpoint = load_checkpoint(str(small))
    assert methods_of(checkpoint.config) == ()
    with pytest.raises(InputError, match="timm's convnext_atto has no attention maps"):
        parse_maps(checkpoint.config, checkpoint.labels, method="rollout")
    with pytest.raises(InputError, match=r"pool 'cls': timm's convnext_atto .* expected head"):
        parse_embedding(checkpoint.config, "cls")
    with pytest.raises(
        CheckpointError, match="is timm's convnext_atto: this is for vitserve's own networks"
    ):
        checkpoint.build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architecture": "resnet_of_nobody"},
            "'resnet_of_nobody' is none of the 247 .* and none of timm's others",
        ),
        ({"architecture": "hf-hub:evil/model"}, "'hf-hub:evil/model' is none of"),
        (
            {"architecture": "resnet10t"},
            "timm does not make it: .* unexpected keyword argument 'depths'",
        ),
        ({"model_args": {"conv_mlp": False}}, "has shape"),
        (
            {"model_args": {"pretrained": True}},
            "argument 'pretrained' is not one of those that size a network",
        ),
        (
            {"model_args": {"checkpoint_path": "/etc/passwd"}},
            "argument 'checkpoint_path' is not one",
        ),
        (
            {"model_args": {"pretrained_cfg": {"url": "http://x"}}},
            "argument 'pretrained_cfg' is not one",
        ),
        ({"model_args": {"norm_layer": "os.system"}}, "norm_layer"),
        ({"model_args": {"depths": "layernorm"}}, "argument depths 'layernorm': expected numbers"),
        (
            {"model_args": {"depths": [1, 1, 1, 10**9]}},
            "argument depths .*: expected numbers up to 16384",
        ),
        ({"model_args": {"dims": [8, 8, 16, 16384]}}, "has shape"),
        ({"model_args": {"dims": []}}, "timm does not make it"),
        ({"model_args": {"img_size": 64}}, "timm does not make it"),
        ({"num_classes": 16384}, "num_classes is 16384, but 5 in model_args"),
        ({"num_classes": "5"}, "num_classes"),
        ({"pretrained_cfg": {"input_size": [3, 10**9, 10**9]}}, "size"),
        ({"pretrained_cfg": {"input_size": [3, 1, 1]}}, "does not take 1x1 pixels of 3 channels"),
        ({"pretrained_cfg": {"input_size": [4, 64, 96]}}, "in_chans is not the 4 of"),
    ],
)
def test_hostile_configs_are_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, small: Path
) -> None:
    folder = shutil.copytree(small, tmp_path / "copy")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(str(edited(folder, **changes)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(folder))


def test_missing_timm_names_the_extra(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: False)
    with pytest.raises(
        CheckpointError, match=r"'convnext_atto' is none of .*pip install 'vitserve\[timm\]'"
    ):
        load_checkpoint(str(small))


@pytest.mark.parametrize(
    ("architecture", "arguments", "size", "message"),
    [
        ("test_resnet", {}, (16384, 16384), "numbers in a layer: at most"),
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 512, "window_size": 128, "depths": (1, 1)},
            (512, 512),
            "buffers",
        ),
    ],
)
def test_an_oversized_network_is_refused(
    architecture: str, arguments: dict[str, Any], size: tuple[int, int], message: str
) -> None:
    timm()
    config = library.library_config(architecture, arguments, 5, 3, size, fixed_size=False)
    with pytest.raises(CheckpointError, match=message):
        library.meta_tensors(config)
