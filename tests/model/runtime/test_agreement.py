"""What counts as the same answer: the worst image of a batch decides."""

from __future__ import annotations

import numpy as np
import pytest

from model.errors import DeviceError
from model.runtime.backend import BatchOutputs, HostOutputs, require_close


def outputs() -> HostOutputs:
    """Outputs of 64 images, the logits and relevance of the last one a hundredth of those of the others."""
    random = np.random.default_rng(0)
    sizes = np.r_[np.ones(63), 0.01].astype(np.float32)
    attention = random.random((64, 1, 3, 10), np.float32)
    logits, relevance = (sizes[:, None] * random.normal(size=(64, 20)).astype(np.float32) for _ in range(2))
    return BatchOutputs(logits, attention / attention.sum(axis=-1, keepdims=True), relevance)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["logits", "attention", "relevance"])
@pytest.mark.parametrize("image", [0, 40, 63])
def test_one_image_of_zeros_among_good_ones_is_refused(name: str, image: int, exact: bool) -> None:
    expected = outputs()
    spoilt = expected.tensors()[name].copy()
    spoilt[image] = 0
    with pytest.raises(DeviceError, match=f"OpenVINO's {name} of an image are"):
        require_close(expected._replace(**{name: spoilt}), expected, exact=exact, source="OpenVINO")


def test_rounding_is_not() -> None:
    expected = outputs()
    rounded = {name: value * np.float32(1.005) for name, value in expected.tensors().items()}
    require_close(BatchOutputs.of(rounded), expected, exact=False, source="OpenVINO")


def test_relevance_of_another_class_or_beside_another_rival_is_not_compared() -> None:
    logits, relevance = np.array([np.arange(20.0), np.arange(20.0)], np.float32), np.ones((2, 10), np.float32)
    expected = BatchOutputs(logits, relevance=relevance)
    other = logits.copy()
    other[0, [18, 19]], other[1, [8, 9]] = 18.5 + np.array([0.01, 0]), 8.5 + np.array([0.01, 0])
    require_close(BatchOutputs(other, relevance=-relevance), expected, exact=False, source="OpenVINO")
    other[1, [8, 9]] = 8.5 - np.array([0.01, 0])  # the same classes in its margin
    with pytest.raises(DeviceError, match="relevance"):
        require_close(BatchOutputs(other, relevance=-relevance), expected, exact=False, source="OpenVINO")
