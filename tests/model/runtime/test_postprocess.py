"""The output of a batch packed into one tensor, and back."""

from __future__ import annotations

import pytest
import torch

from model.config import ViTConfig
from model.runtime.batches import BatchOutputs, BatchRequest
from model.runtime.postprocess import pack, unpack

CONFIG = ViTConfig(image_size=(2, 3), patch_size=1, width=8, depth=2, heads=4, mlp_width=8, num_classes=9)


def outputs(attention: bool = True, relevance: bool = True) -> BatchOutputs:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand((3, 4), generator=generator)
    scores[1] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    return BatchOutputs(
        attention=torch.rand((3, 2, CONFIG.heads, CONFIG.tokens), generator=generator) if attention else None,
        relevance=torch.randn((3, CONFIG.tokens), generator=generator) if relevance else None,
        scores=scores,
        indices=torch.randint(0, 2**31 - 1, (3, 4), generator=generator),
        finite=torch.tensor([True, False, True]),
    )


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("relevance", [True, False])
def test_what_is_unpacked_is_what_was_packed_bit_for_bit(attention: bool, relevance: bool) -> None:
    packed = pack(outputs(attention, relevance))
    found = unpack(packed, BatchRequest(4, layers=(0, 1) if attention else (), relevance=relevance), CONFIG).tensors()

    assert packed.dtype is torch.int32
    expected = outputs(attention, relevance).tensors()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_nothing_unpacked_changes_when_the_memory_is_used_again() -> None:
    packed = pack(outputs())
    found = unpack(packed, BatchRequest(4, layers=(0, 1), relevance=True), CONFIG).tensors()
    packed.zero_()
    for name, tensor in outputs().tensors().items():
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes()
