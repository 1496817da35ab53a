"""Position embeddings of the patches: learned, fixed and relative."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


def sincos2d_position_embedding(
    grid: tuple[int, int], width: int, *, prefix_tokens: int = 0, temperature: float = 10_000.0
) -> Tensor:
    """Return fixed sine and cosine position embeddings.

    Same as big_vision's `posemb_sincos_2d` (Beyer et al. 2022).

    Args:
        grid: (rows, columns) of patches.
        width: D, a multiple of 4: sine and cosine of the column, then sine and cosine of the row.
        prefix_tokens: number of zero entries before the grid's entries.
        temperature: the longest wavelength over 2 pi.

    Returns:
        [1, prefix_tokens + rows*columns, D] float32 on the CPU.
    """
    rows, columns = torch.meshgrid(
        torch.arange(grid[0], dtype=torch.float64, device="cpu"),
        torch.arange(grid[1], dtype=torch.float64, device="cpu"),
        indexing="ij",
    )
    quarter = width // 4
    omega = temperature ** -(
        torch.arange(quarter, dtype=torch.float64, device="cpu") / max(quarter - 1, 1)
    )
    x = columns.reshape(-1, 1) * omega
    y = rows.reshape(-1, 1) * omega
    embedding = torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=1).float()
    return torch.cat((torch.zeros(prefix_tokens, width, device="cpu"), embedding)).unsqueeze(0)


def resize_position_embedding(
    pos_embed: Tensor,
    *,
    prefix_tokens: int,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    antialias: bool = True,
) -> Tensor:
    """Interpolate learned position embeddings to another grid, 2D bicubic in float32.

    Prefix tokens stay unchanged.

    Args:
        pos_embed: [1, prefix_tokens + old_rows*old_columns, D].
        prefix_tokens: number of embeddings before the grid's.
        old_grid, new_grid: (rows, columns) of patches.
        antialias: low-pass before shrinking, as timm's `resample_abs_pos_embed`
            (timm/layers/pos_embed.py), and unlike most of transformers' `interpolate_pos_encoding`.

    Returns:
        [1, prefix_tokens + new_rows*new_columns, D], same dtype.
    """
    if old_grid == new_grid:
        return pos_embed
    prefix = pos_embed[:, :prefix_tokens]
    grid = pos_embed[:, prefix_tokens:]
    width = grid.shape[-1]
    grid = grid.float().reshape(1, *old_grid, width).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=new_grid, mode="bicubic", antialias=antialias)
    grid = grid.permute(0, 2, 3, 1).reshape(1, -1, width).to(pos_embed.dtype)
    return torch.cat((prefix, grid), dim=1)


@lru_cache(maxsize=2)
def relative_position_index(grid: tuple[int, int], class_token: bool = True) -> Tensor:
    """Return the entry of a relative position bias table for each pair of tokens.

    Bao et al. 2021, BEiT.

    Args:
        grid: (rows, columns) of patches.
        class_token: whether a CLS token precedes them.

    Returns:
        [N, N] int64 on the CPU, query by key, into a table of (2*rows-1)*(2*columns-1) offsets.
        With a CLS token, three entries follow: CLS to patch, patch to CLS, CLS to CLS. The tensor
        is shared between callers; do not write to it.
    """
    rows, columns = grid
    offsets = relative_table_size(grid, class_token=False)
    row = torch.arange(rows, device="cpu").repeat_interleave(columns)
    column = torch.arange(columns, device="cpu").repeat(rows)
    down = row[:, None] - row[None, :] + rows - 1
    right = column[:, None] - column[None, :] + columns - 1
    between = down * (2 * columns - 1) + right
    if not class_token:
        return between
    index = torch.empty(rows * columns + 1, rows * columns + 1, dtype=torch.int64, device="cpu")
    index[1:, 1:] = between
    index[0, :] = offsets
    index[:, 0] = offsets + 1
    index[0, 0] = offsets + 2
    return index


def relative_table_size(grid: tuple[int, int], class_token: bool = True) -> int:
    """Return the number of entries of the table that `relative_position_index` describes."""
    return (2 * grid[0] - 1) * (2 * grid[1] - 1) + 3 * class_token


def resize_relative_table(
    table: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Tensor:
    """Interpolate a relative position bias table bilinearly, as transformers' BEiT does.

    Entries of a CLS token stay unchanged.

    Args:
        table: [`relative_table_size(old_grid)`, heads].
        old_grid, new_grid: (rows, columns) of patches.

    Returns:
        float32 [`relative_table_size(new_grid)`, heads].
    """
    if old_grid == new_grid:
        return table
    entries = relative_table_size(old_grid, class_token=False)
    old_size = (2 * old_grid[0] - 1, 2 * old_grid[1] - 1)
    new_size = (2 * new_grid[0] - 1, 2 * new_grid[1] - 1)
    offsets = table[:entries].reshape(1, *old_size, -1).permute(0, 3, 1, 2).float()
    offsets = F.interpolate(offsets, size=new_size, mode="bilinear")
    offsets = offsets.permute(0, 2, 3, 1).reshape(-1, table.shape[1])
    return torch.cat((offsets, table[entries:].float()))
