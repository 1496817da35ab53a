"""Every kind of model on a fake CUDA device: captured work stays on it and never waits."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from model.checkpoint.huggingface import FAMILIES
from model.config import Pool, ViTConfig
from model.heads import Head
from model.layer_config import Activation
from model.network.layers.patch_embed import PatchEmbed
from model.runtime.batch_request import BatchRequest
from model.runtime.cuda import backend as cuda_backend
from model.runtime.cuda.backend import Cuda, with_best
from model.runtime.torch_backend import TorchOptions
from model.runtime.torch_pass import DeviceOutputs, compiled_network
from tests.model.families import HUGGING_FACE, NATIVE, families
from tests.model.runtime.cuda.fake_cuda import META, MetaOps, NotCapturable, captured
from tests.support.random_checkpoint import random_checkpoint

pytestmark = pytest.mark.timeout(60)  # graphs of many kinds

KINDS = families()


BEIT = "BeitForImageClassification 0"


@pytest.fixture(autouse=True)
def _nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile by running the function as it is."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: None)

    def compiled(self: Cuda) -> None:
        self._compiled = compiled_network(
            self._plain, self._normalise, self._folded, any_batch=True
        )

    monkeypatch.setattr(Cuda, "_take_compiled", compiled)


DEEP = {BEIT, "native transfer", "native post-norm"}
"""Kinds with two blocks. Others have one, because all blocks launch the same kernels."""


def config_of(kind: str) -> ViTConfig:
    if kind in DEEP:
        return KINDS[kind]
    return KINDS[kind].model_copy(update={"depth": 1})


def started(kind: str, dtype: torch.dtype) -> Cuda:
    """Return a backend in the state after a start, with the weights on the device."""
    source = random_checkpoint(config_of(kind))
    backend = Cuda(
        TorchOptions(source.build(), source, META, dtype, "on", (2,)), MetaOps(), streams=1
    )
    for module in backend._plain.modules():
        if isinstance(module, PatchEmbed):
            module.as_product = True  # as on CUDA
    backend._take_compiled()
    return backend


PLAIN = BatchRequest(3)
RELEVANCE = BatchRequest(3, relevance=True)


def rows(*layers: int) -> BatchRequest:
    return BatchRequest(3, layers=layers)


def launch(backend: Cuda, *requests: BatchRequest) -> list[str]:
    """Compute a batch for each request as in a capture; return the last one's kernels by name."""
    config = backend.config
    to_capture = backend._scored
    assert isinstance(config, ViTConfig)
    pixels = torch.zeros(2, *config.image_size, config.in_channels, dtype=torch.uint8, device=META)
    for request in requests:
        relevance = request.relevance
        with captured(
            backend._options.dtype, float_products=relevance or config.normalized_head
        ) as kernels:
            outputs = (to_capture if request.network_part in backend.usual else backend._compute)(
                pixels, request
            )
        assert outputs["scores"].shape == (2, 3)
        assert ("attention" in outputs, "relevance" in outputs) == (bool(request.layers), relevance)
        # One request finds the rivals of the best class, another the strongest tokens; a head that
        # reads several blocks needs more.
        counts = range(2, 5) if config.pool == "transfer" else (2,)
        assert kernels.count("topk") in (counts if relevance else (0,))
    return kernels


@pytest.mark.parametrize("kind", KINDS)
def test_every_graph_stays_on_the_device(kind: str) -> None:
    depth = config_of(kind).depth
    requests = [PLAIN, rows(depth - 1), RELEVANCE]
    if depth > 1:
        # The plain model computes rows of every layer; the twin computes the other requests.
        requests.append(rows(*range(depth)))
    launch(started(kind, torch.bfloat16), *requests)


FAULTS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), "the host waits"),
    "a decision": (lambda x: 1 if x.any() else 2, "the host waits"),
    "nonzero": (lambda x: x.nonzero(), "the host waits"),
    "a mask": (lambda x: x[x > 0], "the host waits"),
    "unique": (lambda x: x.unique(), "the host waits"),
    "equal": (lambda x: torch.equal(x, x), "the host waits"),
    "download": (lambda x: x.cpu(), "a tensor on cpu"),
    "upload": (lambda x: torch.tensor([0.5], device=x.device), "a tensor on cpu"),
    "made on the host": (lambda x: torch.arange(5), "a tensor on cpu"),
    "scalar of the host": (lambda x: x * torch.tensor(0.5), "a tensor on cpu"),
    "float64": (lambda x: x.double(), "float64"),
    "made in float64": (lambda x: torch.ones(5, dtype=torch.float64, device=x.device), "float64"),
    "float32 product": (lambda x: x.float() @ x.float().T, "a product of torch.float32"),
    "a product of two dtypes": (lambda x: torch.ops.aten.mm(x, x.float().T), "a product of torch"),
}


@pytest.mark.parametrize(("fault", "words"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(
    fault: Callable[[Tensor], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = with_best

    def faulty(outputs: DeviceOutputs, head: Head, top_k: int) -> DeviceOutputs:
        fault(outputs["logits"])
        return whole(outputs, head, top_k)

    backend = started(BEIT, torch.float16)
    launch(backend, PLAIN)
    monkeypatch.setattr(cuda_backend, "with_best", faulty)
    with pytest.raises(NotCapturable, match=words):
        launch(backend, PLAIN)


def test_no_family_or_switch_is_left_out() -> None:
    assert set(HUGGING_FACE) == {family.class_name for family in FAMILIES}
    assert {config.pool for config in KINDS.values()} == set(get_args(Pool))
    activations = {config.activation for config in KINDS.values()}
    assert activations == set(get_args(Activation)) - {"tanh"}  # only of heads in older folders
    assert set(NATIVE) <= {name.removeprefix("native ") for name in KINDS}
    for name, field in ViTConfig.model_fields.items():
        if field.annotation is bool:
            assert {getattr(config, name) for config in KINDS.values()} == {False, True}, name
