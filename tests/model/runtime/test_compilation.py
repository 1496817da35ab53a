"""The state of the compilation as `/model` shows it, and the batch sizes that are compiled."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from model.config import ViTConfig
from model.errors import DeviceError
from model.explanation.folded_weights import fold
from model.network.layers.attention import Attention
from model.network.vit import VisionTransformer, ViTOutput
from model.runtime import torch_cpu
from model.runtime.backend import Compilation, CompilationState
from model.runtime.batches import BatchOutputs, BatchRequest, captured_sizes, launch_size, powers_of_two
from model.runtime.compilation import (
    choose_kernels,
    compiled_for_any_batch,
    compiled_network,
    compiled_twin,
    plan_compilation,
)
from model.runtime.postprocess import TopK, pack, run_network
from model.runtime.predictor import Predictor
from model.runtime.torch_backend import Normalise
from tests.model.runtime.predictions import predict
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
    assert plan_compilation("on", CPU).state is CompilationState.COMPILING
    assert plan_compilation("auto", GPU).state is CompilationState.COMPILING
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert str(plan_compilation("on", CPU)) == "no C++ compiler (g++) on this machine"


class OutOfResources(Exception):
    """As Triton raises it, which derives its errors from no common class."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("C++ compile error\nmore lines"), "C++ compile error"),
        (OSError("No space left on device"), "No space left on device"),
        (OutOfResources("out of resource: shared memory"), "out of resource: shared memory"),
        (subprocess.CalledProcessError(1, "ptxas"), "Command 'ptxas' returned non-zero exit status 1."),
        (AssertionError(), "AssertionError"),
        (DeviceError("warm-up gave scores that are not finite"), "warm-up gave scores that are not finite"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_compiler_that_fails_is_told_and_the_model_answers_without(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = Predictor(make_checkpoint(), device="cpu", compile_mode="off", dtype="float32", max_batch=2)
    expected = predict(predictor, make_images(2), top_k=5)

    def broken(*_: object, **__: object) -> object:
        def run(*_: object) -> ViTOutput:
            raise error

        return run

    monkeypatch.setattr(torch_cpu, "compiled_twin", broken)
    predictor._backend._compile()  # type: ignore[attr-defined]
    assert predictor.compiled == f"failed: {told}"
    assert predictor.compilation.state is CompilationState.FAILED
    assert predictor.batch_sizes is None
    np.testing.assert_array_equal(predict(predictor, make_images(2), top_k=5).scores, expected.scores)


def test_a_batch_that_is_under_way_when_the_compiled_model_takes_over_does_not_run_on_it_unpadded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    predictor = Predictor(make_checkpoint(), device="cpu", compile_mode="off", dtype="float32", max_batch=4)
    expected = predict(predictor, make_images(3), top_k=5)

    def compiled(*_: object) -> ViTOutput:
        pytest.fail("it would be compiled again, for a size that is never launched")

    def take_over(count: int, sizes: tuple[int, ...] | None) -> int:
        predictor._backend._model = compiled  # type: ignore[attr-defined]
        return launch_size(count, sizes)

    monkeypatch.setattr(torch_cpu, "launch_size", take_over)
    np.testing.assert_array_equal(predict(predictor, make_images(3), top_k=5).scores, expected.scores)


@pytest.mark.parametrize(("largest", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (32, (1, 2, 4, 8, 16, 32))])
def test_sizes_are_powers_of_two_and_the_largest(largest: int, sizes: tuple[int, ...]) -> None:
    assert powers_of_two(largest) == sizes
    assert [launch_size(count, sizes) for count in sizes] == list(sizes)
    assert launch_size(7, None) == 7


def beit() -> VisionTransformer:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(16, 24),
        patch_size=8,
        width=32,
        depth=2,
        heads=2,
        mlp_width=64,
        num_classes=5,
        position_embedding="none",
        relative_position_bias=True,
    )
    model = VisionTransformer(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def attentions(model: VisionTransformer) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def test_the_compiled_twin_holds_the_tensors_of_the_model_wherever_they_are() -> None:
    """Those that a state dict leaves out too: one on another device would be copied in every block."""
    model = beit().to("meta")
    twin = compiled_twin(model)
    tensors = [*twin.parameters(), *twin.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert all(mine is its for mine, its in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    assert twin.blocks[0] is not model.blocks[0]


def test_a_fixed_bias_is_the_one_that_is_gathered_with_rows_that_fused_kernels_read_in_place() -> None:
    model = beit()
    pixels = torch.randn(2, 3, 16, 24)
    gathered = model(pixels, (0, 1))
    for attention in attentions(model):
        expected = attention.bias()
        attention.fix_bias()
        attention.relative_position_bias_table = torch.nn.Parameter(torch.full((1, 2), torch.nan))
        bias = attention.bias()
        assert bias is not None
        assert expected is not None
        assert torch.equal(bias, expected)
        assert bias.shape == (1, 2, 7, 7)
        assert bias.stride()[1:] == (7 * 16, 16, 1)
    for found, wanted in zip(model(pixels, (0, 1)), gathered, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_backend_gathers_no_bias_while_it_serves() -> None:
    model = beit()
    checkpoint = make_checkpoint(config=model.config, tensors=model.state_dict())
    predictor = Predictor(checkpoint, device="cpu", compile_mode="off", dtype="float32", max_batch=2)
    fixed = [attention.fixed_bias for attention in attentions(predictor._backend._plain)]  # type: ignore[attr-defined]
    assert [bias.shape for bias in fixed if bias is not None] == [(1, 2, 7, 7)] * 2


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)),
    ],
)
def test_sizes_that_are_captured_lie_closer_together(largest: int, sizes: tuple[int, ...]) -> None:
    assert captured_sizes(largest) == sizes


def test_padding_to_captured_sizes_is_bounded() -> None:
    sizes = captured_sizes(1024)
    assert len(sizes) == 27
    assert all((launch_size(count, sizes) - count) * 4 <= count for count in range(32, 1025))


@pytest.fixture
def forgetful_compiler() -> Iterator[None]:
    """Let torch forget what it compiled before and afterwards."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


KINDS: dict[str, dict[str, object]] = {
    "two heads, rotary": {"distillation_token": True, "distillation_head": True, "rotary": {"learned": True}},
    "mean, gated, relative bias": {"pool": "mean", "mlp": "swiglu", "layer_scale": True}
    | {"position_embedding": "none", "relative_position_bias": True},
}


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forgetful_compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_compiled_into_a_few_graphs_whatever_batch_sizes_are_launched(kind: str) -> None:
    """As CUDA has it compiled, up to the kernels: they are what takes seconds a graph."""
    torch.manual_seed(0)
    shape = {"image_size": (16, 24), "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "mlp_width": 64}
    model = VisionTransformer(ViTConfig(**(shape | {"num_classes": 5} | KINDS[kind]))).eval()
    for parameter in model.requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    choose_kernels(model, GPU, torch.bfloat16)
    normalise = Normalise(make_checkpoint().preprocess)
    folded = fold(model)
    network = compiled_network(model, normalise, folded, backend="eager")
    top = TopK(make_checkpoint())

    def tail(outputs: BatchOutputs[torch.Tensor], top_k: int) -> torch.Tensor:
        return pack(top(outputs, top_k))

    compiled_tail = compiled_for_any_batch(tail, backend="eager")
    with torch.inference_mode():
        for size in (8, 2, 1, 5):
            images = torch.randint(0, 256, (size, 16, 24, 3), dtype=torch.uint8)
            for request in (BatchRequest(), BatchRequest(layers=(1,)), BatchRequest(relevance=True)):
                expected = run_network(model, normalise(images), request, folded)
                found = network(images, request)
                torch.testing.assert_close(found.tensors(), expected.tensors())
                assert torch.equal(compiled_tail(found, 3), tail(found, 3))
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 10
    assert not torch._dynamo.utils.counters["graph_break"]
