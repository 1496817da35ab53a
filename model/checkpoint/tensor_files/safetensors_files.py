"""Files of safetensors: a header in JSON, and after it the tensors without a gap.

They are read here and not by the library, which maps a file into memory: a file that is overwritten in its place, then
or while its model serves, would end the process. Source of the format: github.com/huggingface/safetensors, README.md.
"""

from __future__ import annotations

import io
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from model.checkpoint.local_files import MAX_TEXT_BYTES, open_file, parse_json
from model.checkpoint.refusals import check_names, reading
from model.checkpoint.tensor_files.opened import (
    MALFORMED,
    MAX_DIMENSIONS,
    is_count,
    read_bytes,
    refuse_beyond_memory,
    refuse_pointer,
)

_TYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_safetensors(path: Path, where: str | None = None) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, as stored, on the CPU.

    Raises:
        CheckpointError: no such file, truncated, malformed or larger than the memory that is free.
    """
    where = where or str(path)
    with open_file(path, where) as file:
        return parsed(file, where)


def parsed(file: BinaryIO, where: str) -> dict[str, Tensor]:
    """Return the tensors of an open file, as `read_safetensors`."""
    with reading(where, "not a valid safetensors file", *MALFORMED):
        refuse_pointer(file, where)
        refuse_beyond_memory(file, where)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_TEXT_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}; at most {MAX_TEXT_BYTES} are read")
        header = parse_json(file.read(length), where)
        header.pop("__metadata__", None)
        check_names(header, where)
        places = {name: _place(name, **entry) for name, entry in header.items()}
        tensors, end = {}, 0
        for name, (begin, stop, dtype, shape) in sorted(places.items(), key=lambda item: item[1][:2]):
            if begin != end:
                raise ValueError(f"{name!r} begins at {begin}, the tensor before it ends at {end}")
            tensors[name], end = read_bytes(file, stop - begin).view(dtype).reshape(shape), stop
        if end != size - 8 - length:
            raise ValueError(f"its tensors have {end} of {size - 8 - length} bytes")
        return tensors


def _place(name: str, dtype: Any, shape: Any, data_offsets: Any) -> tuple[int, int, torch.dtype, list[int]]:
    begin, stop = data_offsets
    if len(shape) > MAX_DIMENSIONS or not all(map(is_count, (*shape, begin, stop))):
        raise ValueError(f"{name!r} has no shape or place")
    if math.prod(shape) * _TYPES[dtype].itemsize != stop - begin:
        raise ValueError(f"{name!r} has shape {shape!r:.100} of {dtype} in {stop - begin} bytes")
    return begin, stop, _TYPES[dtype], shape
