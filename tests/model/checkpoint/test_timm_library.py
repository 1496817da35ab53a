"""Networks that timm's own code runs, saved by timm and read by us: its logits, its embeddings, and nothing unasked."""

from __future__ import annotations

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
from model.insight.summary import summarise
from model.network import library
from model.outputs import RequestedOutputs, methods_of, parse_embedding, parse_maps
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise
from tests.model.checkpoint.folders import edit
from tests.model.checkpoint.parity import pictures, preprocess_file, randomise, relative_error
from tests.model.runtime.predictions import MODES
from tests.timm_reference import timm

EXACT = 1e-5
SMALL: dict[str, Any] = {"depths": (1, 1, 1, 1)}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet-tested": ("test_resnet", {"global_pool": "max"}),
    "convnext": ("convnext_atto", {**SMALL, "dims": (8, 8, 16, 16), "drop_path_rate": 0.5}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 56, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2), "strict_img_size": True},
    ),
    "swin-v2": (
        "swinv2_tiny_window8_256",
        {"img_size": (64, 32), "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2)},
    ),
    "efficientnet": ("test_efficientnet", {"drop_rate": 0.5}),
    "cait": ("cait_xxs24_224", {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2}),
}
FIXED = {"swin", "swin-v2", "xcit", "cait"}
"""Their input size is an argument. The others take any: here a small one, for speed."""


def make(family: str, folder: Path) -> Any:
    """A random network of a family, saved as timm does; returns it in evaluation mode."""
    name, arguments = FAMILIES[family]
    torch.manual_seed(0)
    channels = arguments.get("in_chans", 3)
    small = {"pretrained_cfg_overlay": {"input_size": (channels, 64, 96)}} if family not in FIXED else {}
    model = timm().create_model(name, num_classes=5, **small, **arguments).eval()
    randomise(model)
    for name, statistic in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            torch.nn.init.uniform_(statistic, 0.5, 2)
    labels = {"label_names": [f"n{i}" for i in range(5)]}
    timm().models.save_for_hf(model, folder, model_config=labels, safe_serialization=True)
    return model


def edited(folder: Path, **changes: Any) -> Path:
    """The folder, after a change of its config's fields; those of `model_args` and `pretrained_cfg` are added."""

    def change(config: dict[str, Any]) -> None:
        for key, value in changes.items():
            config[key] = {**(config.get(key) or {}), **value} if isinstance(value, dict) else value

    edit(folder / "config.json", change)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small ConvNeXt, to be copied."""
    folder = tmp_path_factory.mktemp("convnext")
    make("convnext", folder)
    return folder


def assert_same(checkpoint: Checkpoint, model: Any, what: str) -> None:
    """Compare logits and embeddings of the network with those of timm's module."""
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        expected, output = model(pixels), checkpoint.network()(pixels)
        features = model.forward_head(model.forward_features(pixels), pre_logits=True)
    assert expected.std() > 1e-3, "the reference says nothing"
    error = relative_error(output.logits, expected)
    print(f"parity timm's own {what}: {error:.1e}")  # noqa: T201 - for the table in the documentation
    assert error < EXACT
    assert checkpoint.config.width == features.shape[1]
    assert relative_error(output.embeddings["head"], features) < EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_embeddings_are_those_of_timm_in_a_folder_and_in_what_is_converted(
    family: str, tmp_path: Path
) -> None:
    model = make(family, tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    config = checkpoint.config
    assert isinstance(config, LibraryConfig)
    assert (config.architecture, config.library, config.num_classes) == (FAMILIES[family][0], "timm", 5)
    assert_same(checkpoint, model, family)
    native.write(tmp_path / "native", checkpoint, dtype=torch.float32)
    assert_same(load_checkpoint(str(tmp_path / "native")), model, f"{family}, converted")


@pytest.mark.parametrize(("family", "backend"), [("resnet-tested", "torch"), ("swin", "openvino")])
def test_a_predictor_answers_alike(family: str, backend: Any, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    model = make(family, tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    predictor = Predictor(
        checkpoint, device="cpu", dtype="float32", compile_mode=MODES[backend], max_batch=4, streams=1
    )
    assert predictor.backend.startswith(backend)
    images = np.random.default_rng(0).integers(0, 256, (3, *checkpoint.config.image_size, 3), np.uint8)
    with torch.inference_mode():
        expected = model(Normalise(checkpoint.preprocess)(torch.from_numpy(images)))
    outputs = predictor.predict(images, RequestedOutputs(2, logits=True))
    found = torch.from_numpy(np.stack([each.logits for each in outputs if each.logits is not None]))
    assert relative_error(found, expected) < EXACT


def test_a_wrapped_network_of_transformers_and_a_plain_state_dict_are_read_alike(tmp_path: Path) -> None:
    model = make("convnext", tmp_path)
    weights, file = tmp_path / "model.safetensors", tmp_path / "weights.pth"
    save_file({f"timm_model.{name}": tensor for name, tensor in load_file(weights).items()}, weights)
    assert_same(load_checkpoint(str(edited(tmp_path, model_type="timm_wrapper"))), model, "wrapped")
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in model.state_dict().items()}}, file)
    with pytest.raises(CheckpointError, match=r"no file says its preprocessing, labels: .*convnext_atto.*--labels n"):
        load_checkpoint(str(file), architecture="convnext_atto")
    options: dict[str, Any] = {"preprocess": preprocess_file(tmp_path, 32, 64), "labels": "numbers"}
    architecture = "convnext_atto,depths=[1,1,1,1],dims=[8,8,16,16]"
    assert_same(load_checkpoint(str(file), architecture=architecture, **options), model, "plain")
    with pytest.raises(CheckpointError, match=r"weights.pth: missing key .* \(and \d+ more\)"):
        load_checkpoint(str(file), architecture="convnext_atto", **options)


def test_another_input_size_is_run_where_the_network_takes_any(tmp_path: Path) -> None:
    model = make("resnet-tested", tmp_path / "free")
    checkpoint = load_checkpoint(str(tmp_path / "free"), image_size=(96, 64))
    assert checkpoint.preprocess.size == checkpoint.config.image_size == (96, 64)
    assert_same(checkpoint, model, "another size")
    make("swin", tmp_path / "fixed")
    with pytest.raises(CheckpointError, match="timm's swin_tiny_patch4_window7_224 is made for 56x56"):
        load_checkpoint(str(tmp_path / "fixed"), image_size=(112, 112))


def test_it_has_no_maps_and_one_embedding_and_says_so(small: Path) -> None:
    checkpoint = load_checkpoint(str(small))
    assert methods_of(checkpoint.config) == ()
    with pytest.raises(InputError, match="timm's convnext_atto has no attention maps"):
        parse_maps(checkpoint.config, checkpoint.labels, method="rollout")
    with pytest.raises(InputError, match=r"pool 'cls': timm's convnext_atto .* expected head"):
        parse_embedding(checkpoint.config, "cls")
    with pytest.raises(CheckpointError, match="is timm's convnext_atto: this is for vitserve's own networks"):
        checkpoint.build()
    rows = summarise(checkpoint)
    assert rows["runtime"].startswith("timm 1.")
    assert rows["attention maps"] == "none"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "resnet_of_nobody"}, "'resnet_of_nobody' is none of the 247 .* and none of timm's others"),
        ({"architecture": "hf-hub:evil/model"}, "'hf-hub:evil/model' is none of"),
        ({"architecture": "convnext_atto.d2_in1k"}, "'convnext_atto.d2_in1k' is none of"),
        ({"architecture": "resnet10t"}, "timm does not make it: .* unexpected keyword argument 'depths'"),
        ({"model_args": {"conv_mlp": False}}, "has shape"),
        ({"model_args": {"pretrained": True}}, "argument 'pretrained' is none of those that size a network"),
        ({"model_args": {"checkpoint_path": "/etc/passwd"}}, "argument 'checkpoint_path' is none"),
        ({"model_args": {"pretrained_cfg": {"url": "http://x"}}}, "argument 'pretrained_cfg' is none"),
        ({"model_args": {"norm_layer": "os.system"}}, "norm_layer"),
        ({"model_args": {"depths": "layernorm"}}, "argument depths 'layernorm': expected numbers"),
        ({"model_args": {"depths": [1, 1, 1, 10**9]}}, "argument depths .*: expected numbers up to 16384"),
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
def test_hostile_configs_are_refused_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, small: Path
) -> None:
    folder = shutil.copytree(small, tmp_path / "copy")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(str(edited(folder, **changes)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(folder))


def test_without_the_extra_the_refusal_says_how_to_install_it(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: False)
    with pytest.raises(CheckpointError, match=r"'convnext_atto' is none of .*pip install 'vitserve\[timm\]'"):
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
def test_a_network_that_needs_far_more_memory_than_its_file_is_refused(
    architecture: str, arguments: dict[str, Any], size: tuple[int, int], message: str
) -> None:
    timm()
    config = library.library_config(architecture, arguments, 5, 3, size)
    with pytest.raises(CheckpointError, match=message):
        library.meta_tensors(config)
