"""The predictor with the batch launcher: on a stand-in everywhere, and on CUDA if available."""

from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model.checkpoint import Checkpoint
from model.config import ViTConfig
from model.errors import DeviceError, NewProcessNeeded
from model.network.layers.patch_embed import PatchEmbed
from model.network.vit import VisionTransformer
from model.outputs import MapRequest
from model.runtime.backend import CompileMode
from model.runtime.cuda.batch_launcher import BatchLauncher
from model.runtime.predictor import Predictor
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.cuda.launched import launched, plain, same
from tests.model.runtime.predictions import logits_of, predict
from tests.model.runtime.small_models import make_checkpoint, make_images

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_launched_batches_answer_the_same() -> None:
    ops = StandInOps()
    predictor = launched(ops)
    expected = plain()
    predictor.warm_up()
    assert predictor.batch_sizes == (2, 4)
    assert predictor.compiled.endswith("CUDA graphs of the uncompiled model")

    replays = ops.replays
    for count in (1, 3, 4):
        same(
            predict(predictor, make_images(count), top_k=2),
            predict(expected, make_images(count), top_k=2),
        )
    last = [MapRequest.attention_row(1, "max"), None, MapRequest.attention_row(1, 0)]
    same(
        predict(predictor, make_images(3), top_k=5, maps=last),
        predict(expected, make_images(3), top_k=5, maps=last),
    )
    assert ops.replays == replays + 4


@pytest.mark.parametrize("compile_mode", ["auto", "off"])
def test_logits_are_the_same_with_a_graph(compile_mode: CompileMode) -> None:
    ops = StandInOps()
    predictor = plain(compile_mode=compile_mode, max_batch=4, streams=2, ops=ops)
    predictor.warm_up()
    expected = logits_of(plain(), make_images(4))
    replays = ops.replays
    for count in (1, 3, 4):
        found = predict(predictor, make_images(4)[:count], top_k=2, logits=True).logits
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected[:count], atol=1e-5)
    assert predict(predictor, make_images(4), top_k=2).logits is None
    assert ops.replays == replays + (4 if compile_mode == "auto" else 0)
    assert (predictor.compiled == "off") == (compile_mode == "off")


def test_only_other_layers_leave_the_graphs() -> None:
    ops = StandInOps()
    predictor = launched(ops)
    predictor.warm_up()
    replays = ops.replays
    maps = [MapRequest.attention_row(0), MapRequest.attention_row(1, 1), None]
    same(
        predict(predictor, make_images(3), top_k=1, maps=maps),
        predict(plain(), make_images(3), top_k=1, maps=maps),
    )
    assert ops.replays == replays + 2, "of the last layer's row, and of none"


@pytest.mark.parametrize(
    "error", [RuntimeError, ValueError, AssertionError], ids=lambda error: error.__name__
)
def test_a_broken_capture_asks_for_no_graphs(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    ops = StandInOps()
    ops.fail_capture = error("a kernel cannot be captured\nmore lines")
    predictor = launched(ops)
    with pytest.raises(
        NewProcessNeeded,
        match=r"^cpu: the capture of 4 images failed: a kernel cannot be captured$",
    ) as found:
        predictor.warm_up()
    assert (found.value.option, found.value.value) == ("compile", "no-graphs")
    assert (
        "no CUDA graphs: the capture of 4 images failed: a kernel cannot be captured" in caplog.text
    )


def test_a_model_answers_without_graphs() -> None:
    ops = StandInOps()
    predictor = plain(max_batch=4, streams=2, ops=ops, graphs=False)
    predictor.warm_up()
    assert predictor.compiled.endswith("CUDA graphs are off")
    assert (predictor.batch_sizes, ops.captures, ops.replays) == (None, 0, 0)
    same(predict(predictor, make_images(3), top_k=5), predict(plain(), make_images(3), top_k=5))


def test_wrong_graphs_are_not_used() -> None:
    ops = StandInOps()
    ops.spoil_capture = True
    predictor = launched(ops)
    predictor.warm_up()
    reason = (
        "for 2 images the launched model's logits of an image are 1 of their norm away from torch's"
    )
    assert predictor.compiled == f"failed: {reason}"
    assert predictor.batch_sizes is None
    same(predict(predictor, make_images(3), top_k=5), predict(plain(), make_images(3), top_k=5))


def test_a_dead_device_never_becomes_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = StandInOps()
    predictor = launched(ops)

    def dies(*_: object, **__: object) -> None:
        ops.dead = "an illegal memory access was encountered"
        raise RuntimeError(ops.dead)

    monkeypatch.setattr(BatchLauncher, "capture", dies)
    with pytest.raises(
        NewProcessNeeded, match=r"^cpu: an illegal memory access was encountered$"
    ) as raised:
        predictor.warm_up()
    assert (raised.value.option, raised.value.value) == ("compile", "off")


@pytest.mark.parametrize(
    ("rows", "message", "largest"),
    [
        (2, "not enough memory for batches of 8: choose a smaller largest batch", 4),
        (0, "not enough memory for batches of 1$", None),
    ],
)
def test_an_oversized_batch_asks_for_half(rows: int, message: str, largest: int | None) -> None:
    ops = StandInOps()
    predictor = plain(max_batch=8 if rows else 1, ops=ops)
    ops.largest_allocation = rows * 7 * 64 * 4  # the MLP's hidden layer
    with pytest.raises(DeviceError, match=f"^cpu: {message}") as found:
        predictor.warm_up()
    assert getattr(found.value, "value", None) == largest
    assert getattr(found.value, "option", "max_batch") == "max_batch"


def test_launch_sizes_may_be_chosen() -> None:
    predictor = plain(launch_sizes=(3, 1), ops=StandInOps())
    predictor.warm_up()
    assert (predictor.max_batch, predictor.batch_sizes) == (3, (1, 3))
    assert predictor.launch_size(2) == 3


def test_oversized_graphs_shrink_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = StandInOps()
    predictor = launched(ops)
    ops.fail_capture = torch.OutOfMemoryError("CUDA out of memory.\nmore lines")
    with pytest.raises(NewProcessNeeded, match="not enough memory for batches of 4") as found:
        predictor.warm_up()
    assert (found.value.option, found.value.value) == ("max_batch", 2)


@pytest.mark.parametrize("size", [(16, 24), (19, 25)])
def test_patch_product_equals_convolution(size: tuple[int, int]) -> None:
    embed = make_checkpoint().build().patch_embed
    assert isinstance(embed, PatchEmbed)
    pixels = torch.randn(2, 3, *size)
    convolved = embed(pixels)
    embed.as_product = True
    torch.testing.assert_close(embed(pixels), convolved, atol=1e-4, rtol=1e-4)


def of_real_size(**changes: object) -> Checkpoint:
    """Return a model with heads of width 64 and 196 patches, small enough for float32 on a CPU."""
    shape = {
        "image_size": (224, 224),
        "patch_size": 16,
        "width": 192,
        "depth": 3,
        "heads": 3,
        "mlp_width": 768,
    }
    config = ViTConfig(**(shape | {"num_classes": 10} | changes))
    torch.manual_seed(0)
    model = VisionTransformer(config)
    model.reset_parameters()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    preprocess = make_checkpoint().preprocess.model_copy(
        update={"size": (224, 224), "resize_size": (224, 224)}
    )
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return make_checkpoint(
        config=config, preprocess=preprocess, tensors=tensors, labels=tuple("abcdefghij")
    )


REAL_KINDS: dict[str, dict[str, object]] = {
    "cls": {},
    "beit": {
        "position_embedding": "none",
        "relative_position_bias": True,
        "pool": "mean",
        "layer_scale": True,
    },
    "mean": {"pool": "mean", "class_token": False, "position_prefix": False},
    "attention pool": {"pool": "attention", "class_token": False, "position_prefix": False},
    "gated, registers": {"mlp": "swiglu", "registers": 4},
    "rotary": {
        "rotary": {"temperature": 100.0, "centred": True},
        "position_embedding": "none",
        "registers": 4,
    },
    "rotary, learned": {
        "rotary": {"learned": True},
        "mlp": "swiglu",
        "mlp_norm": True,
        "attention_norm": True,
    },
}


def close_to_the_cpu(predictor: Predictor, *, tolerance: float) -> None:
    """Compare logits, top-k and a map, with and without graphs, with float32 on the CPU."""
    checkpoint = predictor.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    last = checkpoint.vit.depth - 1
    reference = Predictor(checkpoint, device="cpu", compile_mode="off", dtype="float32")
    images = np.random.default_rng(5).integers(
        0, 256, (3, *checkpoint.config.image_size, 3), dtype=np.uint8
    )
    expected = logits_of(reference, images)

    def off(logits: NDArray[np.float32]) -> float:
        return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))

    assert off(logits_of(predictor, images)) < tolerance
    for layers in (last, 0):
        maps = [MapRequest.attention_row(layers), None, MapRequest.attention_row(layers, 1)]
        found = predict(predictor, images, top_k=10, maps=maps, logits=True)
        assert off(found.logits) < tolerance
        wanted = predict(reference, images, top_k=10, maps=maps)
        np.testing.assert_allclose(found.scores, wanted.scores, atol=tolerance)
        for got, want in zip(found.maps, wanted.maps, strict=True):
            if got is not None and want is not None:
                np.testing.assert_allclose(got.values, want.values, atol=tolerance / 10)


@pytest.mark.parametrize("kind", ["beit"])
def test_bfloat16_on_the_cpu_stays_close(kind: str) -> None:
    """The requests to the GPU below, on the CPU."""
    predictor = Predictor(
        of_real_size(**REAL_KINDS[kind]),
        device="cpu",
        dtype="bfloat16",
        max_batch=4,
        ops=StandInOps(),
    )
    predictor.check()
    close_to_the_cpu(predictor, tolerance=0.05)


@needs_cuda
@pytest.mark.timeout(400)
class TestOnCuda:
    @pytest.fixture(autouse=True)
    def _forgetful_compiler(self) -> None:
        """Reset the compiler, so that each test compiles its own model."""
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        ("kind", "dtype"), [*zip(REAL_KINDS, repeat("bfloat16")), ("cls", "float16")]
    )
    def test_real_models_stay_close_to_float32(self, kind: str, dtype: str) -> None:
        predictor = Predictor(
            of_real_size(**REAL_KINDS[kind]), device="cuda", dtype=dtype, max_batch=4
        )
        predictor.warm_up()
        assert predictor.compiled == "compiled"
        close_to_the_cpu(predictor, tolerance=0.05)

    def test_graphs_answer_as_the_cpu_does(self) -> None:
        predictor = Predictor(make_checkpoint(), device="cuda", dtype="float32", max_batch=4)
        predictor.warm_up()
        assert predictor.compiled == "compiled"
        assert predictor.batch_sizes == (2, 4)
        for count in (1, 3, 4):
            maps = [MapRequest.attention_row(1, "max"), None, MapRequest.attention_row(1), None][
                :count
            ]
            found = predict(predictor, make_images(count), top_k=5, maps=maps)
            same(found, predict(plain(), make_images(count), top_k=5, maps=maps), atol=5e-3)

    def test_answers_need_no_graph(self) -> None:
        predictor = Predictor(
            make_checkpoint(), device="cuda", dtype="float32", max_batch=4, compile_mode="off"
        )
        predictor.warm_up()
        maps = [MapRequest.attention_row(0), None, MapRequest.attention_row(1, 1)]
        found = predict(predictor, make_images(3), top_k=5, maps=maps)
        same(found, predict(plain(), make_images(3), top_k=5, maps=maps), atol=5e-3)

    def test_threads_get_only_their_own_answers(self) -> None:
        predictor = Predictor(
            make_checkpoint(), device="cuda", dtype="float32", max_batch=4, compile_mode="off"
        )
        predictor.warm_up()
        predictor._backend._capture()  # type: ignore[attr-defined]
        batches = [make_images(8)[start : start + 1 + start % 4] for start in range(5)]
        alone = [predict(predictor, batch, top_k=5) for batch in batches]
        with ThreadPoolExecutor(2) as pool:
            found = list(
                pool.map(lambda turn: predict(predictor, batches[turn % 5], top_k=5), range(500))
            )
        for turn, prediction in enumerate(found):
            same(prediction, alone[turn % 5])
