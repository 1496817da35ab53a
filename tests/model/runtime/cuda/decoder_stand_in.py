"""A decoder that every machine has: Pillow, which fails on what it is told to."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class PillowDecoder:
    """Decodes on the CPU.

    Attributes:
        batches: sizes of the files of each call.
        undecodable: files that it has no pixels for.
        error: what it raises instead of decoding.
    """

    name = "stand-in"

    def __init__(self, device: torch.device | None = None) -> None:
        self.batches: list[list[int]] = []
        self.undecodable: set[bytes] = set()
        self.error: Exception | None = None

    def decode(self, files: Sequence[bytes]) -> list[Tensor | None]:
        self.batches.append([len(file) for file in files])
        if self.error is not None:
            raise self.error
        return [None if file in self.undecodable else _decoded(file) for file in files]


def _decoded(file: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(file)).convert("RGB")))
