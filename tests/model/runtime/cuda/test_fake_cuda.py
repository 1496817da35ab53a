"""Every kind of model on a CUDA device that computes nothing: all that a graph captures stays on it and never waits."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from model.checkpoint.huggingface import FAMILIES
from model.config import Activation, Pool, ViTConfig
from model.network.layers.patch_embed import PatchEmbed
from model.runtime.backend import BatchRequest
from model.runtime.cuda.backend import Cuda
from model.runtime.torch_backend import TorchOptions
from model.runtime.torch_pass import compiled_network
from tests.model.families import HUGGING_FACE, NATIVE, families
from tests.model.network.test_building_blocks import checkpoint
from tests.model.runtime.cuda.fake_cuda import META, MetaOps, captured

KINDS = families()


@pytest.fixture(autouse=True)
def _nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compilers are given is computed as it is."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: None)

    def compiled(self: Cuda) -> None:
        self._compiled = compiled_network(self._plain, self._normalise, self._folded, any_batch=True)

    monkeypatch.setattr(Cuda, "_take_compiled", compiled)


def started(kind: str) -> Cuda:
    """Return a backend as after a start: the weights on the device, the twin in the model's place."""
    source = checkpoint(KINDS[kind])
    backend = Cuda(TorchOptions(source.build(), source, META, torch.bfloat16, "on", (2,)), MetaOps(), streams=1)
    for module in backend._plain.modules():
        if isinstance(module, PatchEmbed):
            module.as_product = True  # as on CUDA
    backend._take_compiled()
    return backend


PLAIN, RELEVANCE = BatchRequest(3), BatchRequest(3, relevance=True)


def rows(*layers: int) -> BatchRequest:
    return BatchRequest(3, layers=layers)


def launch(backend: Cuda, *requests: BatchRequest) -> None:
    """Compute, as a graph would capture it, a batch for each request."""
    config, to_capture = backend.config, backend._scored
    assert isinstance(config, ViTConfig)
    pixels = torch.zeros(2, *config.image_size, config.in_channels, dtype=torch.uint8, device=META)
    for request in requests:
        relevance = request.relevance
        with captured(torch.bfloat16, float_products=relevance or config.normalized_head) as kernels:
            outputs = (to_capture if request.of_network in backend.usual else backend._compute)(pixels, request)
        assert outputs["scores"].shape == (2, 3)
        assert ("attention" in outputs, "relevance" in outputs) == (bool(request.layers), relevance)
        assert kernels.count("topk") == 1 + 2 * relevance  # the rivals of the best class, and the strongest tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_every_kind_stays_on_the_device_and_never_waits(kind: str) -> None:
    last, every = rows(KINDS[kind].depth - 1), rows(*range(KINDS[kind].depth))
    # The twin computes all but the last, the plain model what has rows of every layer.
    launch(started(kind), PLAIN, last, RELEVANCE, every)


def test_no_family_and_no_switch_is_left_out() -> None:
    assert set(HUGGING_FACE) == {family.class_name for family in FAMILIES}
    assert {config.pool for config in KINDS.values()} == set(get_args(Pool))
    assert {config.activation for config in KINDS.values()} == set(get_args(Activation))
    assert set(NATIVE) <= {name.removeprefix("native ") for name in KINDS}
    for name, field in ViTConfig.model_fields.items():
        if field.annotation is bool:
            assert {getattr(config, name) for config in KINDS.values()} == {False, True}, name
