"""Attention maps: combined attention heads, dropped tokens, mixed batches."""

import numpy as np
import pytest
from numpy.typing import NDArray

from model.config import ViTConfig
from model.explanation.maps import Floats, attention_maps, cls_map, sharpened_maps, token_maps
from model.outputs import AttentionHead, MapRequest

CONFIG = ViTConfig(
    image_size=(16, 24), patch_size=8, width=32, depth=3, heads=2, mlp_width=64, num_classes=5
)


def rows(*shape: int) -> NDArray[np.float32]:
    """Return attention rows over the CLS token and 2 x 3 patches."""
    values = np.random.default_rng(0).random((*shape, 2, 7), dtype=np.float32)
    shares: NDArray[np.float32] = values / values.sum(axis=-1, keepdims=True)
    return shares


@pytest.mark.parametrize("head", ["mean", "max", 1])
def test_map_is_the_combined_row_of_patches(head: AttentionHead) -> None:
    attention = rows(4)
    combined = {"mean": attention.mean(1), "max": attention.max(1), 1: attention[:, 1]}[head]
    values, kept_mass = cls_map(attention, head=head, prefix_tokens=1, grid=(2, 3))
    np.testing.assert_allclose(kept_mass, combined[:, 1:].sum(-1), rtol=1e-6)
    np.testing.assert_allclose(
        values.reshape(4, -1) * kept_mass[:, None], combined[:, 1:], rtol=1e-6
    )
    assert values.shape == (4, 2, 3)


def test_a_map_without_attention_is_finite() -> None:
    attention = np.zeros((1, 1, 7), dtype=np.float32)
    attention[..., 0] = 1
    values, kept_mass = cls_map(attention, head=0, prefix_tokens=1, grid=(2, 3))
    assert kept_mass.item() == 0
    assert (values == 0).all()


def test_mixed_batch_keeps_maps_apart() -> None:
    attention = rows(4, 2)  # of layers 0 and 2
    requests = [
        MapRequest.attention_row(2, "max"),
        None,
        MapRequest.attention_row(0, 1),
        MapRequest.attention_row(2, "max"),
    ]
    found = attention_maps(attention, (0, 2), requests, CONFIG)
    assert sorted(found) == [0, 2, 3]
    for image, request in enumerate(requests):
        if request is not None:
            assert request.layer is not None
            assert request.attention_head is not None
            row = attention[image, (0, 2).index(request.layer)][None]
            values, kept_mass = cls_map(
                row, head=request.attention_head, prefix_tokens=1, grid=(2, 3)
            )
            got = found[image]
            assert got.request == request
            np.testing.assert_array_equal(got.values, values[0])
            assert got.kept_mass == kept_mass.item()


TINY = ViTConfig(
    image_size=(16, 24), patch_size=8, width=24, depth=1, heads=3, mlp_width=40, num_classes=5
)
"""Return a grid of 2 x 3 patches after one prefix token."""


def tokens(*rows: list[float]) -> Floats:
    return np.array(rows, np.float32)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-42, 1e30])
def test_scale_of_an_image_has_no_effect(scale: float) -> None:
    found = scale * tokens([2.0, 1.0, 0, 0, 0, 0, 5.0])
    maps, kept = token_maps(found, TINY)
    np.testing.assert_allclose(maps, [[[1 / 6, 0, 0], [0, 0, 5 / 6]]], rtol=1e-2)
    np.testing.assert_allclose(kept, [6 / 8], rtol=1e-2)
    sharp, kept = sharpened_maps(found, TINY)
    np.testing.assert_allclose(sharp, [[[1 / 26, 0, 0], [0, 0, 25 / 26]]], rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(kept, [6 / 8], rtol=1e-2)
    assert maps.dtype == sharp.dtype == kept.dtype == np.float32


def test_negative_relevance_is_not_shown() -> None:
    maps, kept = sharpened_maps(tokens([-4.0, -1.0, 3.0, -1.0, -1.0, -1.0, -1.0]), TINY)
    assert maps[0, 0, 1] > 0.999
    assert kept.tolist() == [1.0], "neither patches nor the prefix have less than nothing"


def test_a_map_without_evidence_is_even() -> None:
    maps, kept = sharpened_maps(tokens([1.0, *[-1.0] * 6], [0.0, 1.0, *[0.0] * 5]), TINY)
    np.testing.assert_allclose(maps[0], np.full((2, 3), 1 / 6), rtol=1e-6)
    assert maps[1, 0, 0] > 0.999
    assert kept.tolist() == [0.0, 1.0]
    maps, kept = token_maps(np.zeros((1, 7), np.float32), TINY)
    np.testing.assert_allclose(maps, np.full((1, 2, 3), 1 / 6), rtol=1e-6)
    assert kept.tolist() == [0.0]
