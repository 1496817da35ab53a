"""Compiling behind graphs of the uncompiled model: a stand-in for a GPU, and a compiler that changes nothing."""

from __future__ import annotations

import copy
import shutil
import threading

import pytest
import torch

from model.errors import NewProcessNeeded
from model.network.vit import VisionTransformer
from model.prediction import MapRequest
from model.runtime.cuda import backend as cuda
from model.runtime.cuda.backend import Cuda
from model.runtime.cuda.batch_launcher import BatchLauncher
from model.runtime.predictor import Predictor
from model.runtime.torch_backend import TorchBackend
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.cuda.test_cuda import plain, same
from tests.model.runtime.predictions import predict
from tests.model.runtime.test_predictor import make_images


class Compiler:
    """A compiler that changes nothing, and that works only when it is let to.

    Attributes:
        may_work: set when it may.
        rows: how many rows each computation of a block had.
        error: what it raises.
    """

    def __init__(self) -> None:
        self.may_work = threading.Event()
        self.rows: list[int] = []
        self.error: Exception | None = None

    def twin(self, model: VisionTransformer, *, autotune: bool) -> VisionTransformer:
        assert self.may_work.wait(20)
        if self.error is not None:
            raise self.error
        twin = copy.deepcopy(model)
        twin.register_forward_pre_hook(lambda _, arguments: self.rows.append(len(arguments[0])))
        return twin


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(cuda, "twin_for_any_batch", compiler.twin)
    monkeypatch.setattr(cuda, "compiled_for_any_batch", lambda function, *, autotune: function)
    return compiler


def wait_for_the_compiler(compiler: Compiler) -> None:
    compiler.may_work.set()
    for thread in threading.enumerate():
        if thread.name == "compile-behind":
            thread.join(20)
            assert not thread.is_alive()


def serving(ops: StandInOps, **options: object) -> Predictor:
    predictor = plain(compile_mode="on", max_batch=4, streams=2, ops=ops, behind=True, **options)
    predictor.warm_up()
    return predictor


def test_the_uncompiled_models_graphs_answer_until_the_compiled_ones_are_there(compiler: Compiler) -> None:
    ops = StandInOps()
    predictor = serving(ops)
    assert predictor.compiled == "compiling; CUDA graphs of the uncompiled model"
    assert predictor.batch_sizes == (1, 2, 4)
    replays, captures = ops.replays, ops.captures
    before = predict(predictor, make_images(3), top_k=5)
    assert ops.replays == replays + 1

    wait_for_the_compiler(compiler)
    assert predictor.compiled == "compiled"
    assert ops.captures == 2 * captures
    compiler.rows.clear()
    replays = ops.replays
    same(predict(predictor, make_images(3), top_k=5), before)
    same(predict(predictor, make_images(1), top_k=5), predict(plain(), make_images(1), top_k=5))
    assert ops.replays == replays + 2
    assert compiler.rows == [4, 2], "a single image is computed twice, by code for two and more"


def test_kernels_are_not_timed_beside_batches(compiler: Compiler) -> None:
    compiler.may_work.set()
    predictor = plain(compile_mode="max", max_batch=2, ops=StandInOps(), behind=True)
    predictor.warm_up()
    assert predictor.compiled == "compiled"
    assert "compile-behind" not in {thread.name for thread in threading.enumerate()}


def test_a_compiler_that_fails_behind_leaves_the_uncompiled_graphs(compiler: Compiler) -> None:
    ops = StandInOps()
    compiler.error = torch.OutOfMemoryError("CUDA out of memory.")
    predictor = serving(ops)
    wait_for_the_compiler(compiler)
    assert predictor.compiled == "failed: CUDA out of memory.; CUDA graphs of the uncompiled model"
    replays = ops.replays
    same(predict(predictor, make_images(3), top_k=5), predict(plain(), make_images(3), top_k=5))
    assert ops.replays == replays + 1


@pytest.mark.parametrize(("breaks", "value"), [("device", "off"), ("capture", "no-graphs")])
def test_a_device_that_is_lost_behind_asks_for_a_new_process_at_the_next_batch(
    breaks: str, value: str, compiler: Compiler
) -> None:
    ops = StandInOps()
    predictor = serving(ops)
    if breaks == "device":
        compiler.error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
        ops.dead = "an illegal memory access was encountered"
    else:
        ops.fail_capture = RuntimeError("a kernel cannot be captured")
    wait_for_the_compiler(compiler)
    for _ in range(2):
        with pytest.raises(NewProcessNeeded) as found:
            predict(predictor, make_images(1), top_k=1)
        assert (found.value.option, found.value.value) == ("compile", value)


def test_maps_that_are_computed_beside_and_captures_hold_the_same_lock(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture clears the workspaces of every stream."""
    predictor = serving(StandInOps())
    backend = predictor._backend
    assert isinstance(backend, Cuda)
    held: list[bool] = []
    capture = BatchLauncher.capture

    def explained(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        held.append(backend._beside.locked())
        return torch.full((1, 2, 3), 1 / 6), torch.ones(1)

    def captured(self: BatchLauncher, *arguments: object, **keywords: object) -> None:
        held.append(keywords["beside"] is backend._beside)
        capture(self, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchBackend, "explain", explained)
    monkeypatch.setattr(BatchLauncher, "capture", captured)
    predict(predictor, make_images(1), top_k=1, maps=[MapRequest("gae")])
    wait_for_the_compiler(compiler)
    assert held == [True, True]
    assert predictor.compiled == "compiled"


def test_without_graphs_the_compiled_model_computes_the_usual_maps_alone(compiler: Compiler) -> None:
    predictor = serving(StandInOps(), graphs=False)
    assert predictor.compiled == "compiling; CUDA graphs are off"
    wait_for_the_compiler(compiler)
    assert predictor.compiled == "compiled; CUDA graphs are off"
    compiler.rows.clear()
    usual, other = [MapRequest.row(1), None, None], [MapRequest.row(0), None, None]
    same(predict(predictor, make_images(3), top_k=5, maps=usual), predict(plain(), make_images(3), top_k=5, maps=usual))
    same(predict(predictor, make_images(3), top_k=5, maps=other), predict(plain(), make_images(3), top_k=5, maps=other))
    assert compiler.rows == [3]
