"""A record of int8 beside a checkpoint: served where it agrees, refused where it is not the checkpoint's."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import Checkpoint, load_checkpoint, native
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError, DeviceError
from model.network.vit import VisionTransformer
from model.outputs import MapRequest
from model.runtime import choice, int8
from model.runtime.backend import INT8_RECORD
from model.runtime.batches import BatchRequest
from model.runtime.device import choose_dtype
from model.runtime.openvino.int8_record import write_record
from model.runtime.openvino.quantization import Comparison, Quantiser
from model.runtime.predictor import Predictor
from model.runtime.torch_backend import TorchOptions
from tests.model.runtime.predictions import predict

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed"),
    pytest.mark.timeout(120),  # models are compiled
]

CONFIG = ViTConfig(image_size=(16, 16), patch_size=8, width=32, depth=2, heads=2, mlp_width=64, num_classes=5)
PREPROCESS = PreprocessConfig(
    size=(16, 16), resize="squash", resize_size=(16, 16), interpolation="bilinear", mean=(0.5,) * 3, std=(0.25,) * 3
)


def make(folder: Path, seed: int = 0, config: ViTConfig = CONFIG) -> Checkpoint:
    """Write a native folder of random weights that are sure of something."""
    torch.manual_seed(seed)
    tensors = {name: 0.5 * torch.randn_like(value) for name, value in VisionTransformer(config).state_dict().items()}
    labels = tuple("abcdef"[: config.num_classes])
    checkpoint = Checkpoint("tiny", "made", native.FORMAT, "vit", config, PREPROCESS, labels, tensors)
    native.write(folder, checkpoint, dtype=torch.float32)
    return load_checkpoint(str(folder))


def traced_graph(checkpoint: Checkpoint) -> Any:
    """The checkpoint's network as a graph in float32."""
    from model.runtime.openvino.tracing import trace

    options = TorchOptions(checkpoint.network(), checkpoint, torch.device("cpu"), torch.float32, "off", (1,))
    return trace(options, BatchRequest()).model


@pytest.fixture(autouse=True)
def a_cpu_with_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "cpu_has_int8", lambda: True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "folder"
    checkpoint = make(folder)
    images = np.random.default_rng(0).integers(0, 256, (16, 16, 16, 3), np.uint8)
    products = Quantiser(traced_graph(checkpoint), "float32", images, threads=1).quantise(0)
    write_record(checkpoint, products, Comparison(0.995, 0.001), pictures=500, calibrated_on=300, dtype="float32")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copied"))


def serve(folder: Path, dtype: str = "int8", **options: Any) -> Predictor:
    return Predictor(load_checkpoint(str(folder)), device="cpu", dtype=dtype, max_batch=2, streams=1, **options)


def change(folder: Path, **fields: Any) -> None:
    path = folder / INT8_RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_classes_come_from_the_graph_in_int8_and_all_else_from_the_one_in_floating_point(folder: Path) -> None:
    found, reference = serve(folder), serve(folder, "float32")
    assert (found.dtype, reference.dtype) == ("int8", "float32")
    assert (found.agreement or "").startswith("float32's best class on 99.50% of 500 views of pictures")
    assert (found.audits, reference.audits) == (True, False)
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    answers = predict(found, images, top_k=5)
    np.testing.assert_array_equal(answers.indices, predict(reference, images, top_k=5).indices)
    assert [found.reference_class(image) for image in images] == answers.indices[:, 0].tolist()
    backend: Any = found._backend
    asked: list[str] = []
    floating, int8 = backend._network, backend._classifier
    backend._classifier = Watched("int8", int8, asked)
    backend._networks[BatchRequest()] = Watched("floating point", floating, asked)
    predict(found, images[:1], top_k=1)
    predict(found, images[:1], top_k=1, maps=[MapRequest.row(layer=1, head="mean")])
    assert asked == ["int8", "floating point"]


class Watched:
    """A network that notes each batch."""

    def __init__(self, name: str, network: Any, asked: list[str]) -> None:
        self._name, self._network, self._asked = name, network, asked
        self.request = network.request

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._asked.append(self._name)
        return self._network(*arguments, **options)


@pytest.mark.parametrize("least", [0.99, 0.996])
def test_auto_serves_it_where_it_agrees_often_enough_and_else_says_why_not(
    folder: Path, least: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = serve(folder, "auto", least_agreement=least)
    if least < 0.995:
        assert found.dtype == "int8"
    else:
        assert found.dtype == str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
        assert found.agreement is None
        [why] = [each for each in caplog.messages if each.startswith("int8 is not used")]
        assert "on 99.50% of 500 views" in why
        assert "99.60% are required (VIT_AGREEMENT)" in why
        with pytest.raises(DeviceError, match=r"dtype 'int8': it gives .* 99.60% are required .*: choose auto"):
            serve(folder, least_agreement=least)


def test_a_plain_checkpoint_never_becomes_int8(tmp_path: Path) -> None:
    make(tmp_path / "plain")
    assert serve(tmp_path / "plain", "auto").dtype != "int8"
    with pytest.raises(CheckpointError, match=r"int8\.json: no such file"):
        serve(tmp_path / "plain")


def test_torch_does_not_run_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert serve(folder, "auto", backend="torch").dtype != "int8"
    assert "int8 is not used: it is OpenVINO's: torch is to run the network" in caplog.messages
    with pytest.raises(DeviceError, match="torch is to run the network"):
        serve(folder, backend="torch")


def test_another_preprocessing_than_the_graphs_is_refused(folder: Path) -> None:
    checkpoint = load_checkpoint(str(folder))
    other = replace(checkpoint, preprocess=PREPROCESS.model_copy(update={"mean": (0.4, 0.5, 0.5)}))
    with pytest.raises(CheckpointError, match="another checkpoint, or for another preprocessing"):
        Predictor(other, device="cpu", dtype="int8", max_batch=1)


def put(folder: Path, text: str) -> None:
    (folder / INT8_RECORD).write_text(text)


def link(folder: Path) -> None:
    shutil.move(folder / INT8_RECORD, folder.parent / "outside.json")
    (folder / INT8_RECORD).symlink_to(folder.parent / "outside.json")


def change_product(folder: Path, **fields: Any) -> None:
    products = json.loads((folder / INT8_RECORD).read_text())["products"]
    change(folder, products={name: product | fields for name, product in products.items()})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: put(folder, "{"), r"int8\.json: not JSON"),
        (lambda folder: put(folder, "[" * 5000), r"int8\.json: not JSON"),
        (lambda folder: put(folder, "[]"), r"int8\.json: holds a list, expected an object"),
        (lambda folder: put(folder, " " * (11 << 20)), r"int8\.json: larger than"),
        (link, r"int8\.json: a symbolic link out of its folder"),
        (lambda folder: change(folder, agreement=1.5), r"int8\.json: agreement: .*less than or equal to 1"),
        (lambda folder: change(folder, agreement=float("nan")), r"int8\.json: agreement"),
        (lambda folder: change(folder, agreement="1"), r"int8\.json: agreement: .*valid number"),
        (lambda folder: change(folder, kl=True), r"int8\.json: kl: .*valid number"),
        (lambda folder: change(folder, version=True), r"int8\.json: version: .*valid integer"),
        (lambda folder: change_product(folder, high="1"), r"int8\.json: products\..*high: .*valid number"),
        (lambda folder: change(folder, hidden=1), r"int8\.json: hidden: "),
        (lambda folder: change(folder, checkpoint="0" * 64), r"int8\.json: made of another checkpoint"),
        (lambda folder: make(folder, seed=2), r"int8\.json: made of another checkpoint"),
        (lambda folder: change(folder, products={"x" * 1001: {}}), r"int8\.json: products\."),
        (
            lambda folder: change_product(folder, way="quick"),
            r"int8\.json: products\..*'static', 'dynamic' or 'floating'",
        ),
        (lambda folder: change_product(folder, low=float("-inf")), r"int8\.json: products\..*low"),
        (lambda folder: change_product(folder, high=-1), r"int8\.json: products\..*high"),
        (lambda folder: change_product(folder, low=0, high=0), r"its logits in int8 correlate with float32's by"),
        (lambda folder: change_product(folder, high=1e30), r"its logits in int8 correlate with float32's by"),
    ],
)
@pytest.mark.parametrize("dtype", ["int8", "auto"])
def test_a_record_that_is_not_the_checkpoints_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], object], message: str, dtype: str
) -> None:
    damage(folder)
    with pytest.raises((CheckpointError, DeviceError), match=message) as refused:
        serve(folder, dtype)
    assert "\n" not in str(refused.value)


def test_a_damaged_record_is_not_looked_at_in_another_dtype(folder: Path) -> None:
    put(folder, "{")
    assert serve(folder, "float32").dtype == "float32"


def test_a_record_for_another_graph_is_left_out_by_auto_and_refused_by_int8(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    products = json.loads((folder / INT8_RECORD).read_text())["products"]
    change(folder, products={f"{name}_1": product for name, product in products.items()})
    assert serve(folder, "auto").dtype != "int8"
    assert [each for each in caplog.messages if each.startswith("int8 is not used: ") and "convert again" in each]
    with pytest.raises(DeviceError, match="it is for another graph, as of another OpenVINO: convert again"):
        serve(folder)


def test_without_instructions_for_int8_auto_leaves_it_out_and_int8_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "cpu_has_int8", lambda: False)
    assert serve(folder, "auto").dtype != "int8"
    with pytest.raises(DeviceError, match="this CPU has no instructions for it, and is faster in float32: choose auto"):
        serve(folder)


def test_a_graph_that_this_cpu_does_not_run_is_left_out_by_auto_and_refused_by_int8(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DeviceError("OpenVINO does not run this model: no kernel")

    monkeypatch.setattr(choice, "OpenVinoNetwork", refuse)
    assert serve(folder, "auto").dtype != "int8"
    assert "int8 is not used: OpenVINO does not run this model: no kernel" in caplog.messages
    with pytest.raises(DeviceError, match="no kernel"):
        serve(folder)
