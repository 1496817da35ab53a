"""An answer in one piece and back."""

from __future__ import annotations

import numpy as np
import torch

from model.runtime.packing import pack, unpack


def test_what_is_unpacked_is_what_was_packed_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand((3, 4), generator=generator)
    scores[1] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    indices = torch.randint(0, 2**31 - 1, (3, 4), generator=generator)
    finite = torch.tensor([True, False, True])
    attention = torch.rand((3, 2, 5, 7), generator=generator)

    packed = pack(scores, indices, finite, attention)
    found = unpack(packed.numpy(), top_k=4, layers=2, heads=5)

    assert packed.dtype is torch.int32
    np.testing.assert_array_equal(found.scores.view(np.int32), scores.numpy().view(np.int32))
    np.testing.assert_array_equal(found.indices, indices.numpy())
    assert found.indices.dtype == np.int64
    np.testing.assert_array_equal(found.finite, finite.numpy())
    assert found.attention is not None
    np.testing.assert_array_equal(found.attention, attention.numpy())


def test_without_attention_there_is_none() -> None:
    packed = pack(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.bool), None)
    assert packed.shape == (2, 3)
    assert unpack(packed.numpy(), top_k=1, layers=0, heads=12).attention is None


def test_nothing_unpacked_changes_when_the_memory_is_used_again() -> None:
    packed = pack(
        torch.ones(2, 1), torch.ones(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.bool), torch.ones(2, 1, 1, 3)
    )
    host = packed.numpy()
    found = unpack(host, top_k=1, layers=1, heads=1)
    host[:] = 0
    assert found.scores.all()
    assert found.indices.all()
    assert found.finite.all()
    assert found.attention is not None
    assert found.attention.all()
