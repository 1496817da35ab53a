"""Which backend runs the network, and why."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from model.runtime import choice
from model.runtime.cuda.backend import Cuda
from model.runtime.openvino.backend import OpenVino
from model.runtime.predictor import Predictor
from model.runtime.torch_cpu import TorchCpu
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.test_predictor import make_checkpoint


def made(**options: Any) -> Predictor:
    return Predictor(make_checkpoint(), device="cpu", **({"dtype": "float32"} | options))


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"compile_mode": "off"}, TorchCpu, "torch is chosen"),
        ({"compile_mode": "on"}, TorchCpu, "torch is chosen"),
        ({"dtype": "float16"}, TorchCpu, "OpenVINO is not possible: "),
        ({"ops": StandInOps()}, Cuda, "torch is chosen"),
    ],
    ids=["requested", "compiled", "half precision", "on an accelerator"],
)
def test_torch_runs_the_network_for_a_reason(options: dict[str, Any], kind: type, reason: str) -> None:
    predictor = made(**options)
    assert isinstance(predictor._backend, kind)
    assert predictor.backend_reason.startswith(reason)
    assert predictor.backend.startswith("torch ")


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_runs_the_network_unless_another_backend_is_requested() -> None:
    predictor = made()
    assert isinstance(predictor._backend, OpenVino)
    assert predictor.backend_reason == "OpenVINO is installed, has the dtype and agrees with torch"


def test_without_the_package_auto_is_torch_and_openvino_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "unsupported_reason", lambda device, dtype: "the package is not installed")
    assert made().backend_reason == "OpenVINO is not possible: the package is not installed"
