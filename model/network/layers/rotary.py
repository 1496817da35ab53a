"""Rotary positions: rotations of queries and keys by angles that grow with row and column.

Su et al. 2021, https://arxiv.org/abs/2104.09864; for pictures Heo et al. 2024,
https://arxiv.org/abs/2403.13298, and timm/layers/pos_embed_sincos.py. A score then depends on the
offset from the query's patch to the key's. Values are not rotated.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.layer_config import RotaryPositions, Size


class Rotary(nn.Module):
    """Rotates feature i of each attention head together with feature i + head_dim / 2.

    Prefix tokens stay unchanged.

    Attributes:
        frequencies: learned frequencies of rows and of columns, [2, heads, head_dim / 2], or None.
        table: see `_table`; None if each pass computes it from the frequencies.
    """

    table: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        assert config.rotary is not None
        self.positions = config.rotary
        self.grid = config.grid
        self.prefix_tokens = config.prefix_tokens
        self.frequencies: nn.Parameter | None = None
        pairs = config.inner_width // config.heads // 2
        table = None
        if config.rotary.learned:
            self.frequencies = nn.Parameter(
                torch.zeros(2, config.heads, pairs), requires_grad=False
            )
        else:
            table = _fixed_table(config.rotary, config.grid, pairs, config.prefix_tokens)
        self.register_buffer("table", table, persistent=False)

    @torch.no_grad()
    def fix(self) -> None:
        """Compute the table once, for a model whose weights are final and still float32."""
        self.table = self._cosines_and_sines()

    def forward(self, x: Tensor) -> Tensor:
        """Rotate queries or keys of all tokens, or of the first tokens: [B, heads, Q, head_dim]."""
        cosines, sines = self._cosines_and_sines()[..., : x.shape[2], :]
        first, second = x.chunk(2, dim=-1)
        return torch.addcmul(x * cosines, torch.cat((second, first), dim=-1), sines)

    def _cosines_and_sines(self) -> Tensor:
        if self.table is not None or self.frequencies is None:
            assert self.table is not None
            return self.table
        learned = self.frequencies.float()
        coordinates = _coordinates(self.positions, self.grid).to(learned.device)
        return _table(coordinates, learned, self.prefix_tokens).to(self.frequencies.dtype)


@lru_cache(maxsize=2)
@torch.inference_mode(mode=False)
def _fixed_table(positions: RotaryPositions, grid: Size, pairs: int, prefix_tokens: int) -> Tensor:
    """Return the `_table` of geometrically falling frequencies.

    The first half of the frequencies is for rows, the second for columns. The table is on the CPU
    and shared between callers; do not write to it.
    """
    half = pairs // 2
    falling = 1 / positions.temperature ** (
        torch.arange(half, dtype=torch.float32, device="cpu") / half
    )
    none = torch.zeros_like(falling)
    frequencies = torch.stack((torch.cat((falling, none)), torch.cat((none, falling))))
    return _table(_coordinates(positions, grid), frequencies, prefix_tokens)


def _coordinates(positions: RotaryPositions, grid: Size) -> Tensor:
    """Return the row and column of each patch in the units of `positions`.

    Returns:
        float32 [2, patches] on the CPU.
    """
    axes = []
    for index, size in enumerate(grid):
        axis = torch.arange(size, dtype=torch.float32, device="cpu")
        if positions.centred:
            axis = (2 * ((axis + 0.5) / size) - 1) * (2 * math.pi)
        else:
            axis = axis + positions.offset
            if positions.reference_grid is not None:
                axis = axis / size * positions.reference_grid[index]
        axes.append(axis)
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)


def _table(coordinates: Tensor, frequencies: Tensor, prefix_tokens: int) -> Tensor:
    """Return cosines, and sines with the sign of each half of the features.

    Args:
        coordinates: rows and columns of the patches, [2, patches].
        frequencies: [2, ..., pairs].

    Returns:
        [2, ..., prefix_tokens + patches, 2 pairs]; prefix tokens have the angle 0.
    """
    rows, columns = coordinates.unsqueeze(-1)
    angles = rows * frequencies[0].unsqueeze(-2) + columns * frequencies[1].unsqueeze(-2)
    angles = nn.functional.pad(angles, (0, 0, prefix_tokens, 0))
    cosines = angles.cos()
    sines = angles.sin()
    return torch.stack((torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)))
