"""FP8 as a dtype of the predictor: where it is refused, what it is compared with, and how it runs in graphs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.errors import DeviceError, NewProcessNeeded
from model.explanation.folded_weights import fold
from model.network.layers.block import Mlp
from model.network.layers.float8 import Float8Linear
from model.network.vit import VisionTransformer
from model.outputs import MapRequest
from model.runtime import building as module
from model.runtime import float8 as float8_module
from model.runtime.batches import BatchRequest
from model.runtime.compilation import choose_kernels, compiled_network
from model.runtime.cuda.batch_launcher import BatchLauncher
from model.runtime.device import choose_dtype
from model.runtime.float8 import agreement, calibration_images, exact_products, use_float8
from model.runtime.predictor import Predictor
from model.runtime.torch_backend import Normalise
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.cuda.test_cuda import close_to_the_cpu, needs_cuda, of_real_size
from tests.model.runtime.predictions import predict
from tests.model.runtime.test_predictor import make_checkpoint, make_images

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "version", "cuda", "reason"),
    [
        ((8, 9), "2.12.0+cu130", "13.0", None),
        ((9, 0), "2.13.1+cu126", "12.6", None),
        ((10, 0), "2.13.1+cu130", "13.0", None),
        ((8, 6), "2.13.1+cu130", "13.0", "cuda:0 has compute capability 8.6, it needs 8.9 or later"),
        ((9, 0), "2.11.0+cu130", "13.0", None),
        ((9, 0), "2.11.0+cu128", "12.8", "torch 2.11.0+cu128 multiplies by rows on the wrong stream"),
        ((8, 9), "2.11.0+cu130", "13.0", "torch 2.11.0+cu130 multiplies by rows on the wrong stream"),
        ((10, 0), "2.11.0+cu130", "13.0", "torch 2.11.0+cu130 multiplies by rows on the wrong stream"),
        ((9, 0), "2.12.0+cu129", "12.9", "CUDA 12.9 refuses small batches of it"),
        ((9, 0), "2.11.0+cu129", "12.9", "CUDA 12.9 refuses small batches of it"),
    ],
)
def test_float8_is_for_gpus_and_versions_that_compute_it(
    capability: tuple[int, int], version: str, cuda: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if reason is None:
        assert choose_dtype("float8", GPU) is torch.bfloat16
    else:
        with pytest.raises(DeviceError, match=re.escape(f"dtype 'float8': {reason}")):
            choose_dtype("float8", GPU)


@pytest.mark.parametrize("backend", ["auto", "torch", "openvino"])
def test_a_cpu_is_told_what_float8_needs_whatever_the_backend(backend: str) -> None:
    with pytest.raises(
        DeviceError, match=r"^dtype 'float8': it needs a GPU of compute capability 8.9 or later, not cpu$"
    ):
        Predictor(make_checkpoint(), device="cpu", dtype="float8", backend=backend)  # type: ignore[arg-type]


def made(**changes: object) -> VisionTransformer:
    shape = {"image_size": (16, 16), "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "mlp_width": 64}
    torch.manual_seed(0)
    model = VisionTransformer(ViTConfig.model_validate(shape | {"num_classes": 5} | changes)).requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.to(torch.bfloat16)


def in_float8(model: VisionTransformer) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, Float8Linear)]


@pytest.mark.parametrize(
    "changes", [{"pool": "attention", "class_token": False, "position_prefix": False}, {"mlp": "swiglu"}], ids=str
)
def test_the_linear_layers_of_the_blocks_are_replaced_and_no_others(changes: dict[str, object]) -> None:
    model = made(**changes)
    choose_kernels(model, GPU, torch.bfloat16)
    use_float8(model)
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert in_float8(model) == [f"blocks.{block}.{layer}" for block in range(2) for layer in layers]
    # The kernel that joins a product and its GELU is bfloat16's.
    assert not any(part.fused for block in model.blocks for part in block.modules() if isinstance(part, Mlp))


def test_a_layer_whose_sizes_the_product_does_not_take_stays_in_bfloat16() -> None:
    model = made(mlp_width=72)
    use_float8(model)
    assert in_float8(model) == [f"blocks.{block}.attn.{layer}" for block in range(2) for layer in ("qkv", "proj")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_code_for_any_batch_size_is_compiled_once_and_gives_the_same() -> None:
    model = made()
    use_float8(model)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"]
    normalise = Normalise(make_checkpoint().preprocess, torch.bfloat16)
    network = compiled_network(model, normalise, fold(model), autotune=False, backend="aot_eager")
    pixels = torch.randint(0, 256, (5, 16, 16, 3), dtype=torch.uint8)
    with torch.inference_mode():
        for size in (5, 3):
            expected = model(normalise(pixels[:size])).logits
            torch.testing.assert_close(network(pixels[:size], BatchRequest()).logits, expected)
    assert counters["stats"]["unique_graphs"] - before == 1


def test_agreement_counts_equal_best_classes_batch_by_batch() -> None:
    model = made()
    use_float8(model)
    sizes: list[int] = []

    def logits(images: np.ndarray) -> np.ndarray:
        sizes.append(len(images))
        exact = all(layer.exact for layer in model.modules() if isinstance(layer, Float8Linear))
        classes = torch.from_numpy(images[:, 0, 0, 0].astype(np.int64))
        return nn.functional.one_hot(classes if exact else classes.clamp_max(3), 5).float().numpy()

    images = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1)
    assert agreement(model, logits, images, batch=2) == pytest.approx(4 / 5)
    assert sizes == [2, 2, 1] * 2


def test_exact_products_end_with_their_context() -> None:
    model = made()
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.bfloat16)
    expected = model(pixels).logits
    use_float8(model)
    with pytest.raises(KeyError), exact_products(model):
        torch.testing.assert_close(model(pixels).logits, expected, rtol=0, atol=0)
        raise KeyError
    assert not torch.equal(model(pixels).logits, expected)


@pytest.mark.parametrize("channels", [3, 1])
def test_the_calibration_set_is_always_the_same_and_no_two_views_are(channels: int) -> None:
    config = make_checkpoint().preprocess
    config = config.model_copy(update={"mean": config.mean[:channels], "std": config.std[:channels]})
    views = calibration_images(config)
    assert (str(views.dtype), views.shape) == ("uint8", (float8_module.VIEWS, *config.size, channels))
    np.testing.assert_array_equal(views, calibration_images(config))
    assert len({view.tobytes() for view in views}) == len(views)


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Predictor]:
    """A predictor in float8 on the stand-in for a device that has it."""
    monkeypatch.setattr(module, "choose_dtype", lambda name, device: torch.bfloat16)
    monkeypatch.setattr(float8_module, "VIEWS", 6)

    def make(**options: object) -> Predictor:
        given = {"device": "cpu", "backend": "torch", "dtype": "float8", "max_batch": 4, "ops": StandInOps()}
        return Predictor(**({"checkpoint": make_checkpoint()} | given | options))  # type: ignore[arg-type]

    return make


def test_graphs_of_float8_answer_as_bfloat16_within_its_precision(
    predictor: Callable[..., Predictor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ops = StandInOps()
    found = predictor(ops=ops)
    found.warm_up()
    assert (found.dtype, ops.captures) == ("float8", 9)
    assert (
        found.agreement
        == "bfloat16's best class on 100.0% of 64 views of the two photographs that vitserve brings along"
    )
    assert f"float8 gives {found.agreement}" in caplog.messages
    reference = Predictor(make_checkpoint(), device="cpu", backend="torch", dtype="float32")
    assert reference.agreement is None
    replays = ops.replays
    for maps in ((), [MapRequest.row(0), None, MapRequest.row(1)], [MapRequest("legrad")] * 3):
        got, wanted = (predict(each, make_images(3), top_k=5, maps=maps) for each in (found, reference))
        np.testing.assert_allclose(got.scores, wanted.scores, atol=0.02)
        for mine, other in zip(got.maps, wanted.maps, strict=True):
            if mine is not None and other is not None:
                np.testing.assert_allclose(mine.values, other.values, atol=0.02)
    assert ops.replays > replays


def test_a_model_without_classes_has_no_agreement(predictor: Callable[..., Predictor]) -> None:
    headed = make_checkpoint()
    config = headed.config.model_copy(update={"num_classes": 0})
    tensors = {name: tensor for name, tensor in headed.tensors.items() if not name.startswith("head.")}
    with pytest.raises(DeviceError, match="it is checked by the best class, and the model has none: choose bfloat16"):
        predictor(checkpoint=make_checkpoint(config=config, tensors=tensors, labels=()))


def test_a_model_that_agrees_too_seldom_is_refused(
    predictor: Callable[..., Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "agreement", lambda *_, **__: 0.97)
    with pytest.raises(
        DeviceError, match=r"^dtype 'float8': it gives bfloat16's best class on 97.0% of 64 views .*99.0%"
    ):
        predictor()
    assert (predictor(least_agreement=0.97).agreement or "").startswith("bfloat16's best class on 97.0%")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore"), DeviceError, "does not run: CUBLAS_STATUS_NOT_SUPPORTED$"),
        (torch.OutOfMemoryError("CUDA out of memory."), NewProcessNeeded, "a smaller largest batch needs less$"),
    ],
)
def test_a_product_that_the_device_does_not_compute_is_told_in_one_line(
    error: Exception,
    kind: type[Exception],
    message: str,
    predictor: Callable[..., Predictor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> Tensor:
        raise error

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    with pytest.raises(kind, match=message):
        predictor()


def test_a_product_in_float8_uses_a_workspace_of_the_graph(
    predictor: Callable[..., Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = predictor(ops=StandInOps())
    monkeypatch.setattr(StandInOps, "clear_workspaces", lambda self: None)
    assert isinstance(found._backend._launcher, BatchLauncher)  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match="the graph holds a workspace that others free"):
        found.warm_up()


@needs_cuda
@pytest.mark.timeout(400)
@pytest.mark.parametrize("changes", [{}, {"mlp": "swiglu", "registers": 4}], ids=str)
def test_on_cuda_float8_is_close_to_float32(changes: dict[str, object]) -> None:
    if reason := float8_module.unsupported_reason(GPU):
        pytest.skip(reason)
    found = Predictor(of_real_size(**changes), device="cuda", dtype="float8", max_batch=4, least_agreement=0)
    found.warm_up()
    assert found.compiled == "compiled"
    close_to_the_cpu(found, tolerance=0.15)
