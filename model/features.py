"""Features of pictures, as vectors. No torch is needed."""

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Smallest norm that vectors are divided by.
_LEAST_NORM: Final = 1e-12


def normalized(vectors: Floats) -> Floats:
    """Return vectors [..., D] divided by their L2 norms."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit_vectors: Floats = vectors / np.maximum(norms, _LEAST_NORM)
    return unit_vectors


class Examples(Protocol):
    """The examples that a head was fitted to."""

    @property
    def examples(self) -> Floats:
        """Return their features, float32 [M, D]."""

    def are_far(self, features: Floats) -> NDArray[np.bool_]:
        """Return whether the pictures of features [B, D] are far from all examples, bool [B]."""
