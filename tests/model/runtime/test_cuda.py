"""The predictor's way through `model.runtime.batch_launcher`: on a stand-in everywhere, on CUDA where there is some."""

from __future__ import annotations

import copy
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from model.errors import DeviceError, NewProcessNeeded
from model.network.layers.patch_embed import PatchEmbed
from model.network.vit import VisionTransformer
from model.prediction import BatchPrediction, MapRequest
from model.runtime import cuda
from model.runtime.batch_launcher import BatchLauncher
from model.runtime.compilation import CompilationState
from model.runtime.cuda import Cuda
from model.runtime.predictor import Predictor
from model.runtime.torch_backend import TorchBackend
from tests.model.runtime.device_stand_in import StandInOps
from tests.model.runtime.test_predictor import make_checkpoint, make_images, spoil_second_image

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def same(found: BatchPrediction, expected: BatchPrediction, *, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(found.scores, expected.scores, atol=atol)
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_array_equal(found.finite, expected.finite)
    for got, wanted in zip(found.maps, expected.maps, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert (got.layer, got.head) == (wanted.layer, wanted.head)
            np.testing.assert_allclose(got.values, wanted.values, atol=atol)
            assert got.kept_mass == pytest.approx(wanted.kept_mass, abs=atol)


def launched(ops: StandInOps, *, max_batch: int = 4) -> Predictor:
    return plain(max_batch=max_batch, streams=2, ops=ops)


def plain(**options: object) -> Predictor:
    return Predictor(make_checkpoint(), device="cpu", backend="torch", dtype="float32", **options)  # type: ignore[arg-type]


def test_launched_batches_get_the_answers_of_the_plain_model() -> None:
    ops = StandInOps()
    predictor = launched(ops)
    expected = plain()
    predictor.warm_up()
    assert predictor.batch_sizes == (1, 2, 4)
    assert predictor.compiled.endswith("CUDA graphs of the uncompiled model")

    replays = ops.replays
    for count in (1, 3, 4):
        same(predictor.predict(make_images(count), top_k=2), expected.predict(make_images(count), top_k=2))
    last = [MapRequest(1, "max"), None, MapRequest(1, 0)]
    same(predictor.predict(make_images(3), top_k=5, maps=last), expected.predict(make_images(3), top_k=5, maps=last))
    assert ops.replays == replays + 4


def test_maps_of_other_layers_are_right_without_a_graph() -> None:
    ops = StandInOps()
    predictor = launched(ops)
    predictor.warm_up()
    replays = ops.replays
    maps = [MapRequest(0), MapRequest(1, 1), None]
    same(predictor.predict(make_images(3), top_k=1, maps=maps), plain().predict(make_images(3), top_k=1, maps=maps))
    assert ops.replays == replays


@pytest.mark.parametrize("error", [RuntimeError, ValueError, AssertionError], ids=lambda error: error.__name__)
def test_a_capture_that_breaks_off_asks_for_a_new_process_and_tells_what_failed_first(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    ops = StandInOps()
    ops.fail_capture = error("a kernel cannot be captured\nmore lines")
    predictor = launched(ops)
    with pytest.raises(
        NewProcessNeeded, match=r"^cpu: the capture of 4 images failed: a kernel cannot be captured$"
    ) as found:
        predictor.warm_up()
    assert (found.value.option, found.value.value) == ("cuda_graphs", "off")
    assert "no CUDA graphs: the capture of 4 images failed: a kernel cannot be captured" in caplog.text


def test_without_graphs_the_model_answers_too() -> None:
    ops = StandInOps()
    predictor = plain(max_batch=4, streams=2, ops=ops, graphs=False)
    predictor.warm_up()
    assert predictor.compiled.endswith("CUDA graphs are off")
    assert (predictor.batch_sizes, ops.captures, ops.replays) == (None, 0, 0)
    same(predictor.predict(make_images(3), top_k=5), plain().predict(make_images(3), top_k=5))


def test_graphs_that_give_other_scores_are_told_and_the_model_answers_without() -> None:
    ops = StandInOps()
    ops.spoil_capture = True
    predictor = launched(ops)
    predictor.warm_up()
    assert predictor.compiled.endswith(
        "no CUDA graphs: the captured graph of 4 images gives other scores than the model"
    )
    assert predictor.batch_sizes is None
    same(predictor.predict(make_images(3), top_k=5), plain().predict(make_images(3), top_k=5))


def test_a_device_that_died_while_an_error_was_swallowed_does_not_become_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = StandInOps()
    predictor = launched(ops)

    def dies(*_: object, **__: object) -> None:
        ops.dead = "an illegal memory access was encountered"
        raise RuntimeError(ops.dead)

    monkeypatch.setattr(BatchLauncher, "capture", dies)
    with pytest.raises(DeviceError, match="the model does not run: CUDA error: an illegal memory access"):
        predictor.warm_up()


@pytest.mark.parametrize("compile_mode", ["auto", "off"])
def test_the_way_of_requests_is_tried_before_the_first_one(compile_mode: str) -> None:
    ops = StandInOps()
    predictor = plain(compile_mode=compile_mode, max_batch=4, streams=2, ops=ops)
    predictor.warm_up()
    answered = [entry for entry in ops.log if entry[0] == "synchronize"]
    assert len(answered) >= 4, "the smallest and the largest batch, with and without a map"


def test_maps_and_many_classes_wait_for_no_compiler_and_no_lasting_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = StandInOps()
    predictor = launched(ops)
    predictor.warm_up()
    assert ops.lasting_captures == ops.captures > 0

    def not_again(*_: object) -> None:
        pytest.fail("the model that is captured runs without its graph")

    backend = predictor._backend
    assert isinstance(backend, Cuda)
    monkeypatch.setattr(backend, "_model", not_again)
    monkeypatch.setattr(backend._launcher, "_captured", (backend._launcher._captured[0], 1))
    same(predictor.predict(make_images(3), top_k=5), plain().predict(make_images(3), top_k=5))


@pytest.mark.parametrize(
    ("rows", "message", "largest"),
    [
        (2, "not enough memory for batches of 8: a smaller largest batch needs less", 4),
        (0, "not enough memory for batches of 1$", None),
    ],
)
def test_a_largest_batch_that_does_not_fit_asks_for_half_of_it(rows: int, message: str, largest: int | None) -> None:
    ops = StandInOps()
    predictor = plain(max_batch=8 if rows else 1, ops=ops)
    ops.largest_allocation = rows * 7 * 64 * 4  # what the MLP makes of so many images
    with pytest.raises(DeviceError, match=f"^cpu: {message}") as found:
        predictor.warm_up()
    assert getattr(found.value, "value", None) == largest
    assert getattr(found.value, "option", "max_batch") == "max_batch"


def test_off_means_no_graphs_either() -> None:
    ops = StandInOps()
    predictor = plain(compile_mode="off", max_batch=2, ops=ops)
    predictor.warm_up()
    assert (predictor.compiled, predictor.batch_sizes, ops.replays) == ("off", None, 0)


def test_an_image_without_a_finite_score_is_told_apart_in_a_graph_too(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = launched(StandInOps())
    predictor.warm_up()
    spoil_second_image(monkeypatch)
    assert predictor.predict(make_images(3), top_k=1).finite.tolist() == [True, False, True]


def test_launch_sizes_may_be_chosen() -> None:
    predictor = plain(launch_sizes=(3, 1), ops=StandInOps())
    predictor.warm_up()
    assert (predictor.max_batch, predictor.batch_sizes) == (3, (1, 3))
    assert predictor.launch_size(2) == 3


def test_graphs_that_do_not_fit_ask_for_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = StandInOps()
    predictor = launched(ops)
    ops.fail_capture = torch.OutOfMemoryError("CUDA out of memory.\nmore lines")
    with pytest.raises(NewProcessNeeded, match="not enough memory for batches of 4") as found:
        predictor.warm_up()
    assert (found.value.option, found.value.value) == ("max_batch", 2)


def test_memory_that_is_not_there_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = plain(max_batch=8)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")

    monkeypatch.setattr(predictor._backend, "exercise", full)
    with pytest.raises(DeviceError, match=r"^cpu: not enough memory for batches of 8: a smaller largest batch"):
        predictor.warm_up()


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
        if thread.name == "compile":
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
    before = predictor.predict(make_images(3), top_k=5)
    assert ops.replays == replays + 1

    wait_for_the_compiler(compiler)
    assert predictor.compiled == "compiled"
    assert ops.captures == 2 * captures
    compiler.rows.clear()
    replays = ops.replays
    same(predictor.predict(make_images(3), top_k=5), before)
    same(predictor.predict(make_images(1), top_k=5), plain().predict(make_images(1), top_k=5))
    assert ops.replays == replays + 2
    assert compiler.rows == [4, 2], "a single image is computed twice, by code for two and more"


def test_a_compiler_that_fails_behind_leaves_the_uncompiled_graphs(compiler: Compiler) -> None:
    ops = StandInOps()
    compiler.error = torch.OutOfMemoryError("CUDA out of memory.")
    predictor = serving(ops)
    wait_for_the_compiler(compiler)
    assert predictor.compiled == "failed: CUDA out of memory.; CUDA graphs of the uncompiled model"
    replays = ops.replays
    same(predictor.predict(make_images(3), top_k=5), plain().predict(make_images(3), top_k=5))
    assert ops.replays == replays + 1


@pytest.mark.parametrize(("breaks", "option"), [("device", "compile"), ("capture", "cuda_graphs")])
def test_a_device_that_is_lost_behind_asks_for_a_new_process_at_the_next_batch(
    breaks: str, option: str, compiler: Compiler
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
            predictor.predict(make_images(1), top_k=1)
        assert (found.value.option, found.value.value) == (option, "off")


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
    predictor.predict(make_images(1), top_k=1, maps=[MapRequest.explained("relevance")])
    wait_for_the_compiler(compiler)
    assert held == [True, True]
    assert predictor.compiled == "compiled"


def test_without_graphs_the_compiled_model_computes_the_usual_maps_alone(compiler: Compiler) -> None:
    predictor = serving(StandInOps(), graphs=False)
    assert predictor.compiled == "compiling; CUDA graphs are off"
    wait_for_the_compiler(compiler)
    assert predictor.compiled == "compiled; CUDA graphs are off"
    compiler.rows.clear()
    usual, other = [MapRequest(1), None, None], [MapRequest(0), None, None]
    same(predictor.predict(make_images(3), top_k=5, maps=usual), plain().predict(make_images(3), top_k=5, maps=usual))
    same(predictor.predict(make_images(3), top_k=5, maps=other), plain().predict(make_images(3), top_k=5, maps=other))
    assert compiler.rows == [3]


@pytest.mark.parametrize("size", [(16, 24), (19, 25)])
def test_patches_as_one_matrix_product_are_the_convolution(size: tuple[int, int]) -> None:
    embed = make_checkpoint().build().patch_embed
    assert isinstance(embed, PatchEmbed)
    pixels = torch.randn(2, 3, *size)
    convolved = embed(pixels)
    embed.as_product = True
    torch.testing.assert_close(embed(pixels), convolved, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_compiled_model_is_what_the_graphs_run() -> None:
    ops = StandInOps(strict=False)
    predictor = plain(compile_mode="on", launch_sizes=(1, 2), streams=2, ops=ops)
    if predictor.compilation.state is not CompilationState.COMPILING:
        pytest.skip(predictor.compiled)
    predictor.warm_up()
    assert predictor.compiled == "compiled"
    assert predictor.batch_sizes == (1, 2)
    replays = ops.replays
    maps = [MapRequest(1), None]
    found = predictor.predict(make_images(2), top_k=5, maps=maps)
    assert ops.replays == replays + 1
    same(found, plain().predict(make_images(2), top_k=5, maps=maps), atol=1e-4)

    # A map of another layer must not make its sender wait for the compiler.
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled > 0
    other = [MapRequest(0), None]
    found = predictor.predict(make_images(2), top_k=5, maps=other)
    same(found, plain().predict(make_images(2), top_k=5, maps=other), atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


@needs_cuda
class TestOnCuda:
    def test_graphs_answer_as_float32_on_the_cpu_does(self) -> None:
        predictor = Predictor(make_checkpoint(), device="cuda", dtype="float32", max_batch=4)
        predictor.warm_up()
        assert predictor.compiled == "compiled"
        assert predictor.batch_sizes == (1, 2, 4)
        for count in (1, 3, 4):
            maps = [MapRequest(1, "max"), None, MapRequest(1), None][:count]
            found = predictor.predict(make_images(count), top_k=5, maps=maps)
            same(found, plain().predict(make_images(count), top_k=5, maps=maps), atol=5e-3)

    def test_other_layers_and_other_sizes_answer_without_a_graph(self) -> None:
        predictor = Predictor(make_checkpoint(), device="cuda", dtype="float32", max_batch=4, compile_mode="off")
        predictor.warm_up()
        maps = [MapRequest(0), None, MapRequest(1, 1)]
        found = predictor.predict(make_images(3), top_k=5, maps=maps)
        same(found, plain().predict(make_images(3), top_k=5, maps=maps), atol=5e-3)

    def test_two_threads_never_get_one_anothers_answers(self) -> None:
        predictor = Predictor(make_checkpoint(), device="cuda", dtype="float32", max_batch=4, compile_mode="off")
        predictor.warm_up()
        predictor._backend.capture()  # type: ignore[attr-defined]
        batches = [make_images(8)[start : start + 1 + start % 4] for start in range(5)]
        alone = [predictor.predict(batch, top_k=5) for batch in batches]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda turn: predictor.predict(batches[turn % 5], top_k=5), range(500)))
        for turn, prediction in enumerate(found):
            same(prediction, alone[turn % 5])
