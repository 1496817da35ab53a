"""The classifier of a state dict is read, stated or left out."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.errors import CheckpointError
from model.outputs import RequestedOutputs
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise
from tests.extensions.formats.home_made import PLAIN, load, made
from tests.model.checkpoint import transformers_models
from tests.model.checkpoint.parity import (
    TOLERANCE,
    assert_same_logits,
    pictures,
    preprocess_file,
    randomise,
    relative_error,
)
from tests.model.runtime.predictions import MODES
from tests.timm_reference import timm, torchvision


@pytest.mark.parametrize(
    "given",
    [PLAIN, "vit_tiny_patch16_224,embed_dim=48,depth=2,patch_size=4,num_heads=3,norm_order=pre"],
)
def test_missing_head_must_be_stated(given: str, tmp_path: Path) -> None:
    model = made(hidden=192)
    state = {
        name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")
    }
    with pytest.raises(
        CheckpointError,
        match=r"no file says its num_classes: .*,num_classes=0 --preprocess \S+ \(.*without a head",
    ):
        load(state, tmp_path, given, labels=None)
    with pytest.raises(
        CheckpointError, match="says num_classes=5, but the file has no head: state num_classes=0"
    ):
        load(state, tmp_path, f"{given},num_classes=5")
    checkpoint = load(state, tmp_path, f"{given},num_classes=0", labels=None)
    assert checkpoint.labels == ()
    pixels = pictures(checkpoint)
    model.head = nn.Identity()
    with torch.inference_mode():
        assert (
            relative_error(checkpoint.build()(pixels).embeddings["head"], model(pixels)) < TOLERANCE
        )
    with pytest.raises(
        CheckpointError, match="says num_classes=0, but the file has a head of 5 classes: state"
    ):
        load(made().state_dict(), tmp_path, f"{given},num_classes=0")


HEADS = (
    "heads",
    "heads.1",
    "heads.head",
    "head.1",
    "classifier",
    "classifier.1",
    "fc",
    "linear_head",
    "mlp_head.1",
)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_read_under_another_name(name: str, tmp_path: Path) -> None:
    model = made()
    state = {n.replace("head.", f"{name}."): t for n, t in model.state_dict().items()}
    assert_same_logits(load(state, tmp_path, PLAIN), model, f"head {name}")


def test_torchvision_models_take_a_new_head(tmp_path: Path) -> None:
    model = torchvision().models.VisionTransformer(32, 16, 2, 4, 48, 96).eval()
    for number, heads in enumerate(
        (nn.Linear(48, 3), nn.Sequential(nn.Dropout(), nn.Linear(48, 3)).eval())
    ):
        model.heads = heads
        randomise(model)
        preprocess = preprocess_file(tmp_path, 32, 32)
        checkpoint = load(model.state_dict(), tmp_path, "vit,num_heads=4", preprocess=preprocess)
        assert_same_logits(checkpoint, model, f"torchvision with heads {number}")


def test_a_likely_head_gets_its_key_map(tmp_path: Path) -> None:
    model = made()
    state = {n.replace("head.", "species.top."): t for n, t in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"'species.top.weight' \[5, 48\] is likely the head"
    ) as refusal:
        load(state, tmp_path)
    (tmp_path / "keys.toml").write_text(str(refusal.value).partition("(VIT_KEYS): ")[2])
    checkpoint = load(state, tmp_path, PLAIN, keys=str(tmp_path / "keys.toml"))
    assert_same_logits(checkpoint, model, "a head by its key map")


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_head_of_layers_can_be_left_out(library: str, tmp_path: Path) -> None:
    state = made().state_dict()
    given = PLAIN
    if library == "transformers":
        model = transformers_models.make("vit", tmp_path)
        state = model.state_dict()
        given = f"vit,num_heads={model.config.num_attention_heads}"
    width = len(state["norm.bias" if library == "timm" else "vit.layernorm.bias"])
    body = {name: tensor for name, tensor in state.items() if not re.match("head|class", name)}
    layers = {"classifier.0.weight": torch.zeros(9, width), "classifier.2.bias": torch.zeros(5)}
    layers["classifier.2.weight"] = torch.zeros(5, 9)
    with pytest.raises(CheckpointError, match=r"several layers, 'classifier.0.weight'") as refusal:
        load(body | layers, tmp_path, given)
    advice = str(refusal.value).partition("keys.toml: ")[2]
    assert re.search(r"convert FILE .*,num_classes=0 .*-o FOLDER, .* --probe --from FOLDER", advice)
    (tmp_path / "keys.toml").write_text(advice.partition(";")[0])
    keys = str(tmp_path / "keys.toml")
    size = model.config.image_size if library == "transformers" else 16
    preprocess = preprocess_file(tmp_path, size, size)
    backbone = load(
        body | layers,
        tmp_path,
        f"{given},num_classes=0",
        keys=keys,
        labels=None,
        preprocess=preprocess,
    )
    assert backbone.config.num_classes == 0


def test_unsupported_head_is_refused(tmp_path: Path) -> None:
    body = {
        name: tensor for name, tensor in made().state_dict().items() if not name.startswith("head.")
    }
    with pytest.raises(
        CheckpointError, match=r"'linear_head.weight' \[5, 240\] reads 5 x 48 features"
    ):
        load(body | {"linear_head.weight": torch.zeros(5, 240)}, tmp_path, PLAIN)


def test_norm_before_a_head_is_told(tmp_path: Path) -> None:
    state = made().state_dict()
    head = {
        "head.0.weight": torch.ones(48),
        "head.0.bias": torch.zeros(48),
        "head.1.weight": state.pop("head.weight"),
        "head.1.bias": state.pop("head.bias"),
    }
    with pytest.raises(
        CheckpointError,
        match=r"a norm, 'head.0.weight' \[48\], before its linear layer 'head.1.weight' \[5, 48\], "
        "but .* train --probe --from FOLDER",
    ):
        load(state | head, tmp_path)


def test_norm_in_a_head_may_be_the_final(tmp_path: Path) -> None:
    model = made()
    model.norm.eps = 1e-5  # torch's default, where the other norms have timm's
    state = {
        re.sub(r"^head\.", "classifier.1.", re.sub(r"^norm\.", "classifier.0.", name)): tensor
        for name, tensor in model.state_dict().items()
    }
    with pytest.raises(CheckpointError, match="this is the final norm") as refusal:
        load(state, tmp_path)
    (tmp_path / "keys.toml").write_text(str(refusal.value).partition("(VIT_KEYS): ")[2])
    checkpoint = load(state, tmp_path, PLAIN, keys=str(tmp_path / "keys.toml"))
    assert_same_logits(checkpoint, model, "a final norm in the head")


class LinearClassifier(nn.Module):
    """DINOv2's linear head of one layer (dinov2/hub/classifiers.py, `_LinearClassifierWrapper`)."""

    def __init__(self, registers: int) -> None:
        super().__init__()
        name = "vit_small_patch14_reg4_dinov2" if registers else "vit_small_patch14_dinov2"
        self.backbone = timm().create_model(
            name, embed_dim=48, depth=2, num_heads=3, img_size=42, num_classes=0
        )
        self.prefix = 1 + registers
        self.linear_head = nn.Linear(96, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.backbone.forward_features(pixels)
        logits: Tensor = self.linear_head(
            torch.cat((tokens[:, 0], tokens[:, self.prefix :].mean(dim=1)), dim=1)
        )
        return logits


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("pool", ["", ",global_pool=cls_mean"])
def test_dinov2s_linear_head_is_read(registers: int, pool: str, tmp_path: Path) -> None:
    model = LinearClassifier(registers).eval()
    randomise(model)
    name = "vit_small_patch14_reg4_dinov2" if registers else "vit_small_patch14_dinov2"
    given = f"{name},embed_dim=48,depth=2,num_heads=3,norm_order=pre{pool}"
    checkpoint = load(
        model.state_dict(), tmp_path, given, preprocess=preprocess_file(tmp_path, 42, 42)
    )
    assert checkpoint.vit.pool == "cls_mean"
    said = "global_pool=cls_mean, because the head reads 2 x 48 features (VIT_ARCHITECTURE)"
    assert (said in checkpoint.assumed) == (not pool)
    assert_same_logits(checkpoint, model, f"DINOv2's linear head, {registers} registers")
    if pool:
        return
    pytest.importorskip("openvino")
    predictor = Predictor(
        checkpoint, device="cpu", dtype="float32", compile_mode=MODES["openvino"], max_batch=2
    )
    images = np.random.default_rng(0).integers(0, 256, (2, 42, 42, 3), np.uint8)
    with torch.inference_mode():
        expected = model(Normalise(checkpoint.preprocess)(torch.from_numpy(images)))
    found = [
        outputs.logits for outputs in predictor.predict(images, RequestedOutputs(2, logits=True))
    ]
    assert relative_error(torch.from_numpy(np.array(found)), expected) < TOLERANCE
