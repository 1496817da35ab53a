"""How many graphs OpenVINO compiles in the tests: one for any batch size, or one for each."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from model.runtime.openvino import network

FIXED_BYTES: Final = network.FIXED_BYTES
"""The limit of the product, below which each batch size has its own graph."""


@contextmanager
def one_graph() -> Iterator[None]:
    """Compile one graph for any batch size, which takes a fraction of one for each size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "FIXED_BYTES", 1)
        yield


def use_a_graph_a_size(patch: pytest.MonkeyPatch) -> None:
    """Compile a graph for each batch size in this test, as the service does for small models."""
    patch.setattr(network, "FIXED_BYTES", FIXED_BYTES)
