"""Archives of tensors: NumPy's `.npz` and TorchServe's `.mar`, unpacked within the memory that is free."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from model.checkpoint.local_files import MAX_TEXT_BYTES, open_file, parse_json
from model.checkpoint.refusals import check_names, reading
from model.checkpoint.tensor_files.opened import MALFORMED, free_memory, open_zip
from model.checkpoint.tensor_files.pickles import unpickled
from model.checkpoint.tensor_files.safetensors_files import parsed
from model.errors import CheckpointError

_MAX_RATIO: Final = 8
"""Bytes to which one of an archive unpacks: weights pack to nine tenths, and those of half precision to a half."""
_MAX_HEADER: Final = 16 << 10
"""Bytes of an array's header, of which NumPy writes 128 and reads 10,000."""


def read_archive(path: Path) -> tuple[Any, dict[str, str] | None]:
    """Return what the state dict of a TorchServe archive holds, and its labels by index or None; its code stays unread.

    Raises:
        CheckpointError: no such file, damaged, unpacking to far more than itself or than the memory that is free, or
            as `read_pickle`.
    """
    where = str(path)
    with open_file(path, where) as file, reading(where, "not an archive of TorchServe", *MALFORMED):
        archive = open_zip(file)
        name = _json(archive, "MAR-INF/MANIFEST.json", where)["model"]["serializedFile"]
        labels = None
        if "index_to_name.json" in archive.namelist():
            named = _json(archive, "index_to_name.json", where)
            labels = {index: label[-1] if isinstance(label, list) else label for index, label in named.items()}
        info = archive.getinfo(name)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name!r:.100} is packed by another way than deflate")
        # The unpacked file and its tensors are held at once.
        if info.file_size > _MAX_RATIO * info.compress_size or 2 * info.file_size > free_memory():
            raise CheckpointError(f"{where}: unpacks to {info.file_size} bytes, more than weights do, or than are free")
        weights, inside = io.BytesIO(archive.read(info)), f"{where}/{name}"
        return (parsed if name.endswith(".safetensors") else unpickled)(weights, inside), labels


def _json(archive: zipfile.ZipFile, name: str, where: str) -> dict[str, Any]:
    if archive.getinfo(name).file_size > MAX_TEXT_BYTES:
        raise CheckpointError(f"{where}/{name}: larger than {MAX_TEXT_BYTES} bytes")
    value = parse_json(archive.read(name), f"{where}/{name}")
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no object")
    return value


def npz_shapes(path: Path) -> dict[str, Tensor]:
    """Return the arrays of an `.npz` file by their headers alone: tensors of the device `meta`, which hold nothing.

    Raises:
        CheckpointError: no such file, damaged, holding objects, or more arrays than any model has.
    """
    with open_file(path, str(path)) as file, reading(str(path), "not a valid .npz file", *MALFORMED):
        archive = open_zip(file)
        infos = archive.infolist()
        check_names([info.filename for info in infos], str(path))
        return {_array_name(info): _header(archive, info, path) for info in infos}


def read_npz(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Return the arrays of these names of an `.npz` file.

    Raises:
        CheckpointError: no such file, damaged, holding objects, or more than the memory that is free.
    """
    with open_file(path, str(path)) as file, reading(str(path), "not a valid .npz file", *MALFORMED):
        archive = open_zip(file)
        infos = {_array_name(info): info for info in archive.infolist()}
        size, free = sum(infos[name].file_size for name in names), free_memory()
        if size > free:
            raise CheckpointError(f"{path}: unpacks to {size >> 20} MiB, {free >> 20} MiB of memory are free")
        tensors = {}
        for name in names:
            with archive.open(infos[name]) as member:
                array = np.lib.format.read_array(member, allow_pickle=False)
            tensors[name] = torch.from_numpy(np.ascontiguousarray(array))
        return tensors


def _array_name(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Tensor:
    with archive.open(info) as member:
        # NumPy reads as long a header as is claimed, and unpacks it, before it compares.
        head = io.BytesIO(member.read(_MAX_HEADER))
    version = np.lib.format.read_magic(head)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = reader(head)
    # A header may claim more than the archive holds; that is refused before it is allocated.
    if dtype.hasobject or dtype.itemsize > 8 or math.prod(shape) * dtype.itemsize > info.file_size:
        raise CheckpointError(f"{path}: {info.filename} holds objects, text, or less than its header claims")
    return torch.empty(shape, device="meta")
