"""Devices and dtypes of a machine with GPUs, as CUDA would tell of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from model.errors import DeviceError
from model.runtime import build
from model.runtime.device import choose_device, choose_dtype, gpu_identifier
from model.runtime.predictor import Predictor
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.predictions import predict
from tests.model.runtime.test_predictor import make_checkpoint, make_images

GPU = torch.device("cuda", 0)
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver"


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_why_cuda_cannot_be_used_is_told_in_its_own_words(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise error(f"{TOO_OLD}\nmore lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(DeviceError) as found:
        choose_device("cuda:1")
    version = torch.__version__
    assert str(found.value) == f"device 'cuda:1': no CUDA device can be used: {TOO_OLD} (torch {version})"


@pytest.mark.parametrize(
    ("capability", "name", "dtype"),
    [
        ((8, 0), "auto", torch.bfloat16),
        ((8, 0), "bfloat16", torch.bfloat16),
        ((7, 5), "auto", torch.float16),
        ((7, 5), "float16", torch.float16),
        ((7, 5), "float32", torch.float32),
    ],
)
def test_a_gpu_computes_in_what_is_native_to_it(
    capability: tuple[int, int], name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_dtype(name, GPU) is dtype


def test_bfloat16_is_refused_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(DeviceError, match=r"^dtype 'bfloat16': cuda:0 \(compute capability 7.5\) has none: float16"):
        choose_dtype("bfloat16", GPU)


@pytest.mark.parametrize(
    ("visible", "expected"), [("MIG-abc", "MIG-abc"), ("MIG-abc,MIG-def", "5d5b"), ("0", "5d5b"), (None, "5d5b")]
)
def test_a_gpu_is_identified_by_itself_or_by_its_only_visible_instance(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="5d5b"))
    assert gpu_identifier(GPU) == expected


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, "float16"), (1e6, "float32")])
def test_a_model_that_overflows_in_the_float16_of_auto_runs_in_float32(
    scale: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "choose_dtype", lambda name, _: torch.float32 if name == "float32" else torch.float16)
    checkpoint = make_checkpoint()
    tensors = dict(checkpoint.tensors)
    tensors["head.weight"] = tensors["head.weight"] * scale
    predictor = Predictor(make_checkpoint(tensors=tensors), device="cpu", max_batch=2, ops=StandInOps())
    assert predictor.dtype == dtype
    predictor.warm_up()
    assert predict(predictor, make_images(2), top_k=1).finite.all()


def test_float16_that_was_asked_for_is_kept_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = dict(make_checkpoint().tensors)
    tensors["head.weight"] = tensors["head.weight"] * 1e6
    checkpoint = make_checkpoint(tensors=tensors)
    predictor = Predictor(checkpoint, device="cpu", dtype="float16", max_batch=1, ops=StandInOps())
    with pytest.raises(DeviceError, match="not finite in float16"):
        predictor.warm_up()
