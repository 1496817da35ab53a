"""Rotary positions: queries and keys are turned by angles that grow with the row and the column of
their patch.

Su et al. 2021, https://arxiv.org/abs/2104.09864; for pictures Heo et al. 2024,
https://arxiv.org/abs/2403.13298, and timm/layers/pos_embed_sincos.py. A score then depends on where
the key is from the query. Values are not turned.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.layer_config import RotaryPositions, Size


class Rotary(nn.Module):
    """Turns feature i of each head together with feature i + head_dim / 2; prefix tokens stay as
    they are.

    Attributes:
        frequencies: of rows and of columns, [2, heads, head_dim / 2], where they are learned.
        table: see `_table`; None where it is computed of the frequencies at each pass.
    """

    table: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        assert config.rotary is not None
        self.positions, self.grid, self.prefix_tokens = (
            config.rotary,
            config.grid,
            config.prefix_tokens,
        )
        self.frequencies: nn.Parameter | None = None
        pairs, table = config.inner_width // config.heads // 2, None
        if config.rotary.learned:
            self.frequencies = nn.Parameter(
                torch.zeros(2, config.heads, pairs), requires_grad=False
            )
        else:
            table = _fixed_table(config.rotary, config.grid, pairs, config.prefix_tokens)
        self.register_buffer("table", table, persistent=False)

    @torch.no_grad()
    def fix(self) -> None:
        """Compute the table once, for a model whose weights change no more and are float32 still."""
        self.table = self._cosines_and_sines()

    def forward(self, x: Tensor) -> Tensor:
        """Turn queries or keys, of all tokens or of the first ones: [B, heads, Q, head_dim] to the
        same.
        """
        cosines, sines = self._cosines_and_sines()[..., : x.shape[2], :]
        first, second = x.chunk(2, dim=-1)
        return torch.addcmul(x * cosines, torch.cat((second, first), dim=-1), sines)

    def _cosines_and_sines(self) -> Tensor:
        if self.table is not None or self.frequencies is None:
            assert self.table is not None
            return self.table
        learned = self.frequencies.float()
        table = _table(
            _places(self.positions, self.grid).to(learned.device), learned, self.prefix_tokens
        )
        return table.to(self.frequencies.dtype)


@lru_cache(maxsize=2)
@torch.inference_mode(mode=False)
def _fixed_table(positions: RotaryPositions, grid: Size, pairs: int, prefix_tokens: int) -> Tensor:
    """Return the `_table` of frequencies that fall geometrically, the first half of rows, the
    second of columns.

    It is on the CPU, shared between callers and must not be written to.
    """
    half = pairs // 2
    falling = 1 / positions.temperature ** (
        torch.arange(half, dtype=torch.float32, device="cpu") / half
    )
    none = torch.zeros_like(falling)
    frequencies = torch.stack((torch.cat((falling, none)), torch.cat((none, falling))))
    return _table(_places(positions, grid), frequencies, prefix_tokens)


def _places(positions: RotaryPositions, grid: Size) -> Tensor:
    """Return the row and the column of each patch in the units of `positions`: float32 [2, patches]
    on the CPU.
    """
    axes = []
    for index, size in enumerate(grid):
        place = torch.arange(size, dtype=torch.float32, device="cpu")
        if positions.centred:
            place = (2 * ((place + 0.5) / size) - 1) * (2 * math.pi)
        else:
            place = place + positions.offset
            if positions.reference_grid is not None:
                place = place / size * positions.reference_grid[index]
        axes.append(place)
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)


def _table(places: Tensor, frequencies: Tensor, prefix_tokens: int) -> Tensor:
    """Return cosines, and sines with the sign of each half of the features.

    Args:
        places: of rows and of columns, [2, patches].
        frequencies: [2, ..., pairs].

    Returns:
        [2, ..., prefix_tokens + patches, 2 pairs]; the prefix tokens' turn is none.
    """
    rows, columns = places.unsqueeze(-1)
    angles = rows * frequencies[0].unsqueeze(-2) + columns * frequencies[1].unsqueeze(-2)
    angles = nn.functional.pad(angles, (0, 0, prefix_tokens, 0))
    cosines, sines = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)))
