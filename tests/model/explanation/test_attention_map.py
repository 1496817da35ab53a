"""Attention maps: how heads are combined, which tokens are dropped, and what a mixed batch gets."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from model.config import ViTConfig
from model.explanation.maps import attention_maps, cls_map
from model.outputs import Head, MapRequest

CONFIG = ViTConfig(image_size=(16, 24), patch_size=8, width=32, depth=3, heads=2, mlp_width=64, num_classes=5)


def rows(*shape: int) -> NDArray[np.float32]:
    """Attention rows over the CLS token and 2 x 3 patches."""
    values = np.random.default_rng(0).random((*shape, 2, 7), dtype=np.float32)
    shares: NDArray[np.float32] = values / values.sum(axis=-1, keepdims=True)
    return shares


@pytest.mark.parametrize("head", ["mean", "max", 1])
def test_a_map_is_the_combined_row_without_prefix_tokens_divided_by_its_sum(head: Head) -> None:
    attention = rows(4)
    combined = {"mean": attention.mean(1), "max": attention.max(1), 1: attention[:, 1]}[head]
    values, kept_mass = cls_map(attention, head=head, prefix_tokens=1, grid=(2, 3))
    np.testing.assert_allclose(kept_mass, combined[:, 1:].sum(-1), rtol=1e-6)
    np.testing.assert_allclose(values.reshape(4, -1) * kept_mass[:, None], combined[:, 1:], rtol=1e-6)
    assert values.shape == (4, 2, 3)


def test_a_head_that_gives_the_patches_nothing_has_a_finite_map() -> None:
    attention = np.zeros((1, 1, 7), dtype=np.float32)
    attention[..., 0] = 1
    values, kept_mass = cls_map(attention, head=0, prefix_tokens=1, grid=(2, 3))
    assert kept_mass.item() == 0
    assert (values == 0).all()


def test_a_mixed_batch_gets_each_map_from_its_own_image_layer_and_head() -> None:
    attention = rows(4, 2)  # of layers 0 and 2
    requests = [MapRequest.row(2, "max"), None, MapRequest.row(0, 1), MapRequest.row(2, "max")]
    found = attention_maps(attention, (0, 2), requests, CONFIG)
    assert sorted(found) == [0, 2, 3]
    for image, request in enumerate(requests):
        if request is not None:
            assert request.layer is not None
            assert request.head is not None
            row = attention[image, (0, 2).index(request.layer)][None]
            values, kept_mass = cls_map(row, head=request.head, prefix_tokens=1, grid=(2, 3))
            got = found[image]
            assert got.request == request
            np.testing.assert_array_equal(got.values, values[0])
            assert got.kept_mass == kept_mass.item()
