"""The predictor's way through `model.runtime.batch_launcher`: on a stand-in everywhere, on CUDA where there is some."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from model.errors import DeviceError
from model.network.layers.patch_embed import PatchEmbed
from model.prediction import BatchPrediction, MapRequest
from model.runtime.compilation import CompilationState
from model.runtime.predictor import Predictor
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


def test_a_failed_capture_is_told_and_the_model_answers_without() -> None:
    ops = StandInOps()
    ops.fail_capture = RuntimeError("operation not permitted when stream is capturing\nmore lines")
    predictor = launched(ops)
    predictor.warm_up()
    assert predictor.compiled.endswith("no CUDA graphs: operation not permitted when stream is capturing")
    assert predictor.batch_sizes is None
    same(predictor.predict(make_images(3), top_k=5), plain().predict(make_images(3), top_k=5))


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


def test_memory_that_is_not_there_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = plain(max_batch=8)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")

    monkeypatch.setattr(predictor._backend, "exercise", full)
    with pytest.raises(DeviceError, match=r"^cpu: not enough memory for batches of 8: a smaller largest batch"):
        predictor.warm_up()


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
    ops = StandInOps()
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
