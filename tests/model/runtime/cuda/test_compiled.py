"""Compiling before the first answer, with a stand-in for a GPU and torch's compiler."""

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checkpoint import Checkpoint
from model.errors import NewProcessNeeded
from model.network.vit import VisionTransformer
from model.outputs import MapRequest
from model.runtime import torch_backend
from model.runtime.backend import CompilationState
from model.runtime.batch_request import BatchRequest
from model.runtime.cuda import backend as cuda
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import DeviceOutputs, Network, compiled_network
from tests.model.runtime.cuda.device_stand_in import StandInOps, StandInStream
from tests.model.runtime.cuda.launched import plain, same
from tests.model.runtime.predictions import predict
from tests.model.runtime.small_models import make_checkpoint, make_images

LAST = MapRequest.attention_row(1)
RELEVANCE = MapRequest("relevance")


pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile by running the function as it is."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run traced graphs without compiled kernels, which need a C++ compiler and minutes."""
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: torch._dynamo.optimize("eager")(function)
    )
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def warm(ops: StandInOps, checkpoint: Checkpoint | None = None, **options: Any) -> Predictor:
    options |= {
        "device": "cpu",
        "backend": "torch",
        "dtype": "float32",
        "compile_mode": "on",
        "max_batch": 4,
    }
    predictor = Predictor(checkpoint or make_checkpoint(), streams=2, ops=ops, **options)
    predictor.warm_up()
    return predictor


def traced() -> int:
    """Return how many graphs dynamo has made."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def not_strict() -> StandInOps:
    """Return a device whose operators are not checked, because dynamo fails otherwise."""
    return StandInOps(strict=False)


def test_the_compiled_model_is_captured_once() -> None:
    ops = not_strict()
    threads = threading.active_count()
    predictor = warm(ops)
    assert predictor.compiled == "compiled"
    assert predictor.batch_sizes == (2, 4)
    assert ops.captures == 2 * 3, "two sizes, without a map and with either default"
    assert threading.active_count() == threads
    replays = ops.replays
    for count in (1, 3):
        same(
            predict(predictor, make_images(count), top_k=5),
            predict(plain(), make_images(count), top_k=5),
        )
    assert ops.replays == replays + 2


@pytest.mark.usefixtures("tracer")
@pytest.mark.parametrize("graphs", [True, False])
def test_no_request_compiles_anything(
    graphs: bool,
) -> None:
    """Neither in a capture nor for a request: the compiler has seen all kinds of tensors."""
    seen: set[int] = set()

    class Counting(StandInOps):
        def capture(self, work: Callable[[], None], stream: StandInStream) -> Callable[[], None]:
            seen.add(traced())
            return super().capture(work, stream)

    predictor = warm(Counting(strict=False), graphs=graphs)
    seen.add(traced())
    for kind in (LAST, RELEVANCE, MapRequest.attention_row(0), None):
        predict(predictor, make_images(3), top_k=5, maps=[kind] * 3)
    assert seen == {traced()}
    assert traced() > 0


@pytest.mark.usefixtures("tracer")
def test_every_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, dynamo compiles a function a few times, and then silently runs it uncompiled."""
    usual_limit = 2
    before = traced()
    config = make_checkpoint(depth=1).vit.model_copy(update={"mlp": "swiglu", "qk_norm": True})
    model = VisionTransformer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    with torch._dynamo.config.patch(recompile_limit=usual_limit):
        predictor = warm(not_strict(), make_checkpoint(config=config, tensors=tensors))
        assert torch._dynamo.config.recompile_limit == usual_limit, "others keep their limit"
    assert predictor.compiled == "compiled"
    assert traced() - before > usual_limit

    monkeypatch.setattr(torch_backend, "RECOMPILE_LIMIT", 1)
    predictor = warm(not_strict(), graphs=False)
    assert predictor.compilation.state is CompilationState.FAILED


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("name", "factor"), [("logits", 1.2), ("attention", 1.2), ("relevance", -1.0)]
)
def test_a_wrong_kernel_is_not_served(
    name: str,
    factor: float,
    graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wrong(*arguments: Any, **options: Any) -> Network:
        network = compiled_network(*arguments, **options)

        def run(pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
            outputs = network(pixels, request)
            if name not in outputs or len(pixels) != 4:
                return outputs
            return outputs | {name: factor * outputs[name]}

        return run

    monkeypatch.setattr(cuda, "compiled_network", wrong)
    ops = not_strict()
    predictor = warm(ops, graphs=graphs)
    reason = (
        rf"for 4 images the launched model's {name} of an image are [\d.]+ of their norm away "
        "from torch's"
    )
    assert re.fullmatch(f"failed: {reason}", predictor.compiled)
    assert re.search(reason, caplog.text)
    assert predictor.batch_sizes is None
    replays = ops.replays
    for maps in ([LAST] * 4, [RELEVANCE] * 4):
        expected = predict(plain(), make_images(4), top_k=5, maps=maps)
        same(predict(predictor, make_images(4), top_k=5, maps=maps), expected)
    assert ops.replays == replays


class SlowCompiler:
    """A compiler that waits for a signal, and multiplies the logits of 4 images."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, factor: float = 1.0) -> None:
        self.begun = threading.Event()
        self.done = threading.Event()
        self._factor = factor
        monkeypatch.setattr(cuda, "compiled_network", self._compile)

    def _compile(self, *arguments: Any, **options: Any) -> Network:
        self.begun.set()
        assert self.done.wait(60)
        network = compiled_network(*arguments, **options)

        def run(pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
            outputs = network(pixels, request)
            factor = self._factor if len(pixels) == 4 else 1.0
            return outputs | {"logits": factor * outputs["logits"]}

        return run


def serving(ops: StandInOps) -> Predictor:
    """Return a predictor that is ready and not yet compiled."""
    options: Any = {
        "device": "cpu",
        "dtype": "float32",
        "compile_mode": "on",
        "max_batch": 4,
        "streams": 2,
    }
    predictor = Predictor(make_checkpoint(), ops=ops, **options)
    predictor.warm_up(compile_later=True)
    return predictor


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_a_model_answers_while_compiling(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SlowCompiler(monkeypatch, factor)
    ops = not_strict()
    predictor = serving(ops)
    expected = {count: predict(plain(), make_images(count), top_k=5) for count in (2, 4)}
    answered = 0
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(predictor.finish_warm_up)
        assert compiler.begun.wait(60)
        assert predictor.compiled == "compiling"
        while not finished.done() or answered < 4:
            for count in (2, 4):
                same(predict(predictor, make_images(count), top_k=5), expected[count])
                answered += 1
            if answered == 4:
                assert (predictor.batch_sizes, ops.captures) == (None, 0)
                compiler.done.set()
        finished.result()
    is_right = factor == 1
    assert predictor.batch_sizes == ((2, 4) if is_right else None)
    assert predictor.compiled.startswith("compiled" if is_right else "failed: for 4 images")
    replays = ops.replays
    same(predict(predictor, make_images(4), top_k=5), expected[4])
    assert ops.replays == replays + is_right


def failing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, before: Callable[[], object] = lambda: None
) -> None:
    """Make the compiler fail."""

    def compiled(*_: object, **__: object) -> Network:
        before()
        raise error

    monkeypatch.setattr(cuda, "compiled_network", compiled)


def test_a_failed_compiler_leaves_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, RuntimeError("ptxas was not found\nmore lines"))
    ops = not_strict()
    predictor = warm(ops)
    assert predictor.compiled == "failed: ptxas was not found; CUDA graphs of the uncompiled model"
    replays = ops.replays
    same(predict(predictor, make_images(3), top_k=5), predict(plain(), make_images(3), top_k=5))
    assert ops.replays == replays + 1


def test_a_lost_device_needs_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = StandInOps()
    failing(
        monkeypatch,
        RuntimeError("illegal"),
        lambda: setattr(ops, "dead", "an illegal memory access"),
    )
    with pytest.raises(NewProcessNeeded, match="an illegal memory access") as raised:
        warm(ops)
    assert (raised.value.option, raised.value.value) == ("compile", "off")
