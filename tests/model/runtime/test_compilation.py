"""The state of the compilation as `/model` shows it, and the batch sizes that are compiled."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from model.network.vit import ViTOutput
from model.runtime import torch_backend
from model.runtime.backend import launch_size
from model.runtime.compilation import Compilation, CompilationState, plan_compilation, powers_of_two
from model.runtime.predictor import Predictor
from tests.model.runtime.test_predictor import make_checkpoint, make_images

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("compilation", "text"),
    [
        (Compilation(CompilationState.OFF), "off"),
        (Compilation(CompilationState.COMPILING), "compiling"),
        (Compilation(CompilationState.COMPILED), "compiled"),
        (Compilation(CompilationState.FAILED, "no space left"), "failed: no space left"),
        (Compilation(CompilationState.SKIPPED, "off on the CPU unless asked for"), "off on the CPU unless asked for"),
        (Compilation(CompilationState.COMPILED, graphs="no CUDA graphs: oh"), "compiled; no CUDA graphs: oh"),
    ],
    ids=str,
)
def test_it_is_told_in_one_line(compilation: Compilation, text: str) -> None:
    assert str(compilation) == text


def test_it_is_planned_from_the_mode_the_device_and_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert plan_compilation("off", GPU).state is CompilationState.OFF
    assert plan_compilation("auto", CPU).state is CompilationState.SKIPPED
    assert [plan_compilation(mode, CPU).state for mode in ("on", "max")] == [CompilationState.COMPILING] * 2
    assert plan_compilation("auto", GPU).state is CompilationState.COMPILING
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert str(plan_compilation("on", CPU)) == "no C++ compiler (g++) on this machine"


def test_a_compiler_that_fails_is_told_and_the_model_answers_without(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor(make_checkpoint(), device="cpu", backend="torch", dtype="float32", max_batch=2)
    expected = predictor.predict(make_images(2), top_k=5)

    def broken(*_: object, **__: object) -> object:
        def run(*_: object) -> ViTOutput:
            raise RuntimeError("C++ compile error\nmore lines")

        return run

    monkeypatch.setattr(torch_backend, "compiled_twin", broken)
    predictor._backend._compile()  # type: ignore[attr-defined]
    assert predictor.compiled == "failed: C++ compile error"
    assert predictor.compilation.state is CompilationState.FAILED
    assert predictor.batch_sizes is None
    np.testing.assert_array_equal(predictor.predict(make_images(2), top_k=5).scores, expected.scores)


def test_a_batch_that_is_under_way_when_the_compiled_model_takes_over_does_not_run_on_it_unpadded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    predictor = Predictor(make_checkpoint(), device="cpu", backend="torch", dtype="float32", max_batch=4)
    expected = predictor.predict(make_images(3), top_k=5)

    def compiled(*_: object) -> ViTOutput:
        pytest.fail("it would be compiled again, for a size that is never launched")

    def take_over(count: int, sizes: tuple[int, ...] | None) -> int:
        predictor._backend._model = compiled  # type: ignore[attr-defined]
        return launch_size(count, sizes)

    monkeypatch.setattr(torch_backend, "launch_size", take_over)
    np.testing.assert_array_equal(predictor.predict(make_images(3), top_k=5).scores, expected.scores)


@pytest.mark.parametrize(("largest", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (32, (1, 2, 4, 8, 16, 32))])
def test_sizes_are_powers_of_two_and_the_largest(largest: int, sizes: tuple[int, ...]) -> None:
    assert powers_of_two(largest) == sizes
    assert [launch_size(count, sizes) for count in sizes] == list(sizes)
    assert launch_size(7, None) == 7
