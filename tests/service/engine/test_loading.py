"""The description of a loaded model, kept graphs and kernels, and the child that makes them."""

import dataclasses
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.calibration import Calibration, Fit
from model.checkpoint import native
from model.checkpoint.files import Files
from model.description import Description
from model.errors import CheckpointError, DeviceError
from model.outputs import MapRequest, RequestedOutputs
from model.runtime.predictor import Predictor
from service.engine import loading
from service.engine.cache_folder import keep_kernels
from service.engine.loading import load_predictor
from service.settings import load_settings
from tests.needs import needs_methods
from tests.service.cli.command_line import write_checkpoint
from tests.service.fakes import PATIENCE


@pytest.mark.parametrize(("given", "name"), [({}, "vit-cifar10"), ({"model_name": "cats"}, "cats")])
def test_every_fact_comes_from_the_model(given: dict[str, str], name: str) -> None:
    predictor, info = load_predictor(
        load_settings({"device": "cpu", "compile": "off", "max_batch": "3", **given})
    )
    checkpoint = predictor.checkpoint
    facts = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    assert facts.pop("name") == name
    for own in (
        "source",
        "revision",
        "format",
        "architecture",
        "config",
        "preprocess",
        "labels",
        "content",
        "form",
    ):
        assert facts.pop(own) == getattr(checkpoint, own)
    assert facts.pop("backend").startswith("torch ")
    assert facts.pop("parameters") > 1_000_000
    assert facts.pop("backbone").endswith("-auto")
    assert time.time() - 3600 < facts.pop("loaded_at") <= time.time()
    assert facts == {
        "temperature": checkpoint.temperature,
        "multi_label": False,
        "device": "cpu",
        "dtype": predictor.dtype,
        "max_batch": 3,
        "gpu_uuid": None,
        "assumed": (),
        "zero_shot": None,
        "coverage": None,
        "calibrated_on": 2500,
        "head": f"{checkpoint.content}-None",
        "is_served_head": False,
        "has_thresholds": False,
        "features": "head",
    }


def test_a_head_has_its_labels_thresholds() -> None:
    settings = {"device": "cpu", "compile": "off", "max_batch": "1", "thresholds": {"cat": 0.4}}
    predictor, info = load_predictor(load_settings(settings))
    [outputs] = predictor.predict(
        np.zeros((1, 32, 32, 3), np.uint8), RequestedOutputs(10, head_name=info.head)
    )
    assert outputs.thresholds is not None
    found = {
        info.labels[index]: threshold
        for index, threshold in zip(outputs.indices, outputs.thresholds, strict=True)
    }
    assert found == dict.fromkeys(info.labels, 0.0) | {"cat": np.float32(0.4)}
    with pytest.raises(CheckpointError, match=r"thresholds: .* has no label 'kat'"):
        load_predictor(load_settings(settings | {"thresholds": {"kat": 0.4}}))


@pytest.mark.parametrize(
    ("device", "used", "name", "visible"),
    [
        ("cpu", "cpu", None, "4,5"),
        ("auto", "auto", None, "4,5"),
        ("cuda", "cuda:0", None, "4"),
        ("cuda:1", "cuda:0", "cuda:1", "5"),
        ("cuda:MIG-6", "cuda:0", "cuda:MIG-6", "MIG-6"),
    ],
)
def test_a_gpu_is_first_in_its_process(
    device: str, used: str, name: str | None, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading.show_alone.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    made: list[dict[str, Any]] = []

    def predictor(_: Any, **options: Any) -> None:
        made.append(options)
        raise DeviceError("enough")

    monkeypatch.setattr("model.runtime.predictor.Predictor", predictor)
    with pytest.raises(DeviceError, match="enough"):
        load_predictor(load_settings({"device": device}))
    assert (made[0]["device"], made[0]["device_name"], made[0]["graphs"]) == (used, name, True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE", (
        "no thread of torch spins beside those that decode"
    )


@pytest.mark.parametrize("here", [True, False])
def test_an_unusable_gpu_is_logged_loudly(
    here: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "gpus_are_here", lambda: here)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        "model.runtime.device.unusable_reason",
        lambda: "The NVIDIA driver on your system is too old",
    )
    load_predictor(load_settings({"compile": "off", "max_batch": "1"}))
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == ["THE GPU IS NOT USED: The NVIDIA driver on your system is too old"] * here


def test_a_hanging_disk_delays_no_other(tmp_path: Path) -> None:
    """Before Python 3.12 `functools.cached_property` has one lock for all instances."""
    never = threading.Event()
    began = threading.Event()

    class Hanging(Files):
        def path(self, name: str) -> Path | None:
            began.set()
            never.wait(PATIENCE)
            return None

    hung = threading.Thread(target=lambda: Hanging(tmp_path, "hung").config)
    other = threading.Thread(target=lambda: Files(tmp_path, "other").config)
    try:
        hung.start()
        assert began.wait(PATIENCE)
        other.start()
        other.join(1)
        assert (hung.is_alive(), other.is_alive()) == (True, False)
    finally:
        never.set()
        hung.join(PATIENCE)


def keep_graph(predictor: Predictor) -> None:
    """Warm a predictor up, and wait for the thread that keeps its graph."""
    predictor.warm_up()
    for thread in threading.enumerate():
        if thread.name == "openvino-compile":
            thread.join()


@needs_methods
def test_a_new_calibration_keeps_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    folder = write_checkpoint(tmp_path / "m", ("cat", "dog"))
    given = {
        "checkpoint": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "cache_dir": str(tmp_path / "cache"),
    }
    start = partial(load_predictor, load_settings(given))
    images = np.full((1, 16, 16, 3), 200, np.uint8)
    request = RequestedOutputs(2, MapRequest("gae", class_index=0))
    first = start()[0]
    keep_graph(first)
    served = start()[0]
    assert type(served.checkpoint) is Description
    [before] = first.predict(images, request)
    calibration = Calibration.of("made", 39, Fit(2.5), np.full(39, 0.1), np.full(39, -99.0))
    native.write_calibration(folder, calibration)

    [answer] = served.predict(images, request)  # torch is loaded for it, and the folder read again
    np.testing.assert_allclose(answer.scores, before.scores, rtol=1e-4)
    assert answer.map is not None
    assert before.map is not None
    assert answer.map.score == pytest.approx(before.map.score, rel=1e-4)

    for kept in (False, True):
        settings = load_settings(given | {"coverage": 0.9})
        predictor, info = load_predictor(settings)
        keep_graph(predictor)
        assert (type(predictor.checkpoint) is Description) == kept
        assert (info.coverage, info.calibrated_on, info.temperature) == (0.9, 39, 2.5)
        [answer] = predictor.predict(images, RequestedOutputs(1, label_set=True))
        assert answer.label_set is not None
        assert len(answer.label_set) in (1, 2)
    monkeypatch.setattr(
        "model.runtime.start.OpenVinoNetwork", lambda *_, **__: pytest.fail("compiled for nothing")
    )
    with pytest.raises(
        CheckpointError, match=r"39 pictures, too few for a coverage of 0\.96: 49 are enough"
    ) as refused:
        load_predictor(load_settings(given | {"coverage": 0.96}))
    assert "\n" not in str(refused.value)


def test_a_loaded_backbone_gets_another_head(tmp_path: Path) -> None:
    folders = [
        write_checkpoint(tmp_path / labels[0], labels)
        for labels in (("cat", "dog"), ("ant", "bee"))
    ]
    first, second = (
        load_settings({"checkpoint": str(folder), "device": "cpu", "compile": "off"})
        for folder in folders
    )
    predictor, info = load_predictor(first)
    other, further = load_predictor(second, {info.backbone: predictor}.get)
    assert other is predictor
    assert set(predictor.heads) == {info.head, further.head}
    assert further.labels == ("ant", "bee")


def test_nothing_is_kept_where_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "model.runtime.openvino.kept.KeptEntry.__init__", lambda *_, **__: pytest.fail("it is kept")
    )
    load_predictor(load_settings({"device": "cpu", "cache_dir": "off"}))


def test_only_its_settings_rebuild_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    folder = write_checkpoint(tmp_path / "m", ("cat", "dog"))
    given = {"checkpoint": str(folder), "dtype": "float32", "cache_dir": str(tmp_path / "cache")}
    first, made = load_predictor(load_settings(given))
    keep_graph(first)

    run = {"max_batch": 5, "device": "cpu"}
    for changes in (run, {"model_name": "other", "port": 1}):
        kept, info = load_predictor(load_settings(given | changes))
        assert type(kept.checkpoint) is Description
        assert info.max_batch == kept.max_batch == changes.get("max_batch", 8)
        assert (info.backbone, info.head, info.content) == (made.backbone, made.head, made.content)
    for name, value in (
        ("dtype", "bfloat16"),
        ("image_size", (24, 24)),
        ("checkpoint_folder", str(tmp_path)),
    ):
        predictor, _ = load_predictor(load_settings(given | {name: value}))
        assert type(predictor.checkpoint) is not Description, name


@pytest.mark.timeout(180)  # torch is imported
def test_a_later_start_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    first = write_checkpoint(tmp_path / "first", ("ant", "bee"), depth=1)
    other = write_checkpoint(tmp_path / "m", ("cat", "dog"))
    kept = {
        "checkpoint": str(first),
        "device": "cpu",
        "cache_dir": str(tmp_path / "cache"),
        "image_size": "24x16",
    }
    keep_graph(load_predictor(load_settings(kept))[0])
    script = """
        import sys
        from service.engine.loading import load_predictor
        from service.settings import load_settings
        given = {"device": "cpu", "cache_dir": sys.argv[1], "image_size": "24x16"}
        for path in sys.argv[2:]:
            predictor, info = load_predictor(load_settings(given | {"checkpoint": path}))
            print(info.labels, info.preprocess.size, "torch" in sys.modules, sep="|")
    """
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(script),
        *map(str, (tmp_path / "cache", first, other)),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=150)
    assert ran.stdout.splitlines() == [
        "('ant', 'bee')|(24, 16)|False",
        "('cat', 'dog')|(24, 16)|True",
    ]


def test_torch_is_linked_before_its_import() -> None:
    script = """
        import sys
        from pathlib import Path
        from service.engine.checkpoint_files import link_torch
        link_torch()
        print("libtorch_cpu" in Path("/proc/self/maps").read_text(), "torch" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=150)
    assert ran.stdout.split() == ["True", "False"]


def test_kernels_are_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TRITON_CACHE_DIR": "/elsewhere"}
    monkeypatch.setattr(os, "environ", environment)
    keep_kernels(load_settings({"cache_dir": str(tmp_path)}))
    assert environment == {
        "TRITON_CACHE_DIR": "/elsewhere",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "CUDA_CACHE_PATH": str(tmp_path / "cuda"),
    }


@pytest.mark.parametrize("folder", ["off", "a file/below"])
def test_an_unusable_cache_keeps_no_kernels(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    cache_dir = folder if folder == "off" else str(tmp_path / folder)
    keep_kernels(load_settings({"cache_dir": cache_dir}))
    assert environment == {}
    assert ("compiled kernels are not kept" in caplog.text) == (folder != "off")
