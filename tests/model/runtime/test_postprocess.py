"""The output of a batch packed into one tensor, and back."""

from __future__ import annotations

import numpy as np
import torch

from model.runtime.postprocess import TopKOutput, pack, unpack


def test_what_is_unpacked_is_what_was_packed_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand((3, 4), generator=generator)
    scores[1] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    indices = torch.randint(0, 2**31 - 1, (3, 4), generator=generator)
    finite = torch.tensor([True, False, True])
    attention = torch.rand((3, 2, 5, 7), generator=generator)

    packed = pack(TopKOutput(scores, indices, finite, attention))
    found = unpack(packed, top_k=4, layers=2, heads=5)

    assert packed.dtype is torch.int32
    np.testing.assert_array_equal(found.scores.numpy().view(np.int32), scores.numpy().view(np.int32))
    np.testing.assert_array_equal(found.indices, indices.numpy())
    assert found.indices.dtype is torch.int64
    np.testing.assert_array_equal(found.finite, finite.numpy())
    assert found.attention is not None
    np.testing.assert_array_equal(found.attention, attention.numpy())


def test_without_attention_there_is_none() -> None:
    packed = pack(
        TopKOutput(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.bool), None)
    )
    assert packed.shape == (2, 3)
    assert unpack(packed, top_k=1, layers=0, heads=12).attention is None


def test_nothing_unpacked_changes_when_the_memory_is_used_again() -> None:
    ones = torch.ones(2, 1)
    packed = pack(TopKOutput(ones, ones.long(), torch.ones(2, dtype=torch.bool), torch.ones(2, 1, 1, 3)))
    found = unpack(packed, top_k=1, layers=1, heads=1)
    packed.zero_()
    assert found.scores.all()
    assert found.indices.all()
    assert found.finite.all()
    assert found.attention is not None
    assert found.attention.all()
