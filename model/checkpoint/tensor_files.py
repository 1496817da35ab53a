"""Tensors from a file: safetensors, `torch.save`'s pickle read as data only, and NumPy's `.npz`."""

from __future__ import annotations

import math
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model.checkpoint.refusals import reading
from model.errors import CheckpointError

PICKLE_SUFFIXES: Final = (".pth", ".pt", ".bin")

_NESTED: Final = ("model", "state_dict", "model_state_dict", "module", "net")
_WRAPPERS: Final = ("module.", "_orig_mod.")
"""Of DistributedDataParallel and torch.compile, which wrap any model."""
USUAL_PREFIXES: Final = (*_WRAPPERS, "model.", "backbone.", "net.", "network.", "encoder.")
"""What training code puts before every name of a model that is a part of another, e.g. of a LightningModule."""

_ADVICE: Final = (
    "no code from a file is run here: where it was made, save the weights alone with "
    "torch.save(model.state_dict(), FILE), or convert them to .safetensors"
)
_TRANSFORMERS_ADVICE: Final = (
    "no code from a file is run here: where it was made, save the model as a folder with "
    "model.save_pretrained(FOLDER) and processor.save_pretrained(FOLDER), and give that folder"
)

_MAX_NPZ_ARRAYS: Final = 10_000
_MAX_NPZ_BYTES: Final = 64 << 30
_MEMORY: Final = Path("/proc/meminfo")
_CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
"""Of this process, as a container sees it."""

_MALFORMED: Final = (
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    MemoryError,
    ImportError,
    SyntaxError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What the readers of safetensors, torch and NumPy raise on damaged files."""


def read_safetensors(path: Path, where: str | None = None) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, as stored, on the CPU.

    Raises:
        CheckpointError: no such file, truncated or malformed.
    """
    with reading(where or str(path), "not a valid safetensors file", SafetensorError, *_MALFORMED):
        return load_file(path, device="cpu")


def read_pickle(path: Path, where: str | None = None) -> dict[str, Tensor]:
    """Return the state dict of a file that `torch.save` wrote; no code in it is run.

    A state dict may lie under the names of `_NESTED`, as training scripts save it, and its names may
    start with those of `_WRAPPERS`.

    Raises:
        CheckpointError: no such file, damaged, holding more than tensors, or no state dict.
    """
    where = where or str(path)
    with reading(where, "not a file that torch.save wrote", *_MALFORMED), warnings.catch_warnings():
        # What torch warns of (other pickle protocols, old formats) it then reads or refuses.
        warnings.simplefilter("ignore", UserWarning)
        _refuse_packed(path, where)
        try:
            value = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            text = str(error)
            if isinstance(error, RuntimeError) and "weights_only" not in text:
                raise
            raise CheckpointError(f"{where}: refused, it is not plain tensors: {_found(text)}") from None
    return _state_dict(value, where)


def _refuse_packed(path: Path, where: str) -> None:
    """Refuse an archive that unpacks to more than itself: torch packs nothing, but unpacks what others did."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
        if size > path.stat().st_size:
            raise CheckpointError(f"{where}: unpacks to {size} bytes, more than it has: torch.save packs nothing")


def _found(text: str) -> str:
    """Return what a file holds instead of plain tensors, from torch's message, and advice that is not torch's."""
    if "TorchScript" in text:
        return f"a TorchScript archive, which holds code; {_ADVICE}"
    named = re.search(r"GLOBAL ([\w.]{1,200})", text)
    if named is None:
        return f"damaged, or of a program other than torch; {_ADVICE}"
    advice = _TRANSFORMERS_ADVICE if named[1].startswith("transformers.") else _ADVICE
    return f"it holds the Python object {named[1]}; {advice}"


def _state_dict(value: Any, where: str) -> dict[str, Tensor]:
    while isinstance(value, Mapping):
        nested = next((value[key] for key in _NESTED if isinstance(value.get(key), Mapping)), None)
        if nested is None:
            break
        value = nested
    if not isinstance(value, Mapping) or not value:
        raise CheckpointError(f"{where}: holds a {type(value).__name__}, expected a state dict of tensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{where}: {name!r} holds a {type(tensor).__name__}, expected a tensor")
        if tensor.layout == torch.strided and tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{where}: {name!r} has shape {list(tensor.shape)}, more than the file holds")
        tensors[name] = tensor.detach()
    return without_prefixes(tensors, _WRAPPERS)


def without_prefixes(tensors: Mapping[str, Tensor], prefixes: Collection[str] = USUAL_PREFIXES) -> dict[str, Tensor]:
    """Return tensors without the usual prefixes, also nested, that all their names share.

    Args:
        tensors: as a file names them.
        prefixes: those that are taken away, each with its dot.
    """
    stripped = dict(tensors)
    while prefix := next((p for p in prefixes if stripped and all(name.startswith(p) for name in stripped)), None):
        stripped = {name.removeprefix(prefix): tensor for name, tensor in stripped.items()}
    return stripped


def npz_shapes(path: Path) -> dict[str, Tensor]:
    """Return the arrays of an `.npz` file by their headers alone: tensors of the device `meta`, which hold nothing.

    Raises:
        CheckpointError: no such file, damaged, holding objects, or more arrays than any model has.
    """
    with reading(str(path), "not a valid .npz file", *_MALFORMED), zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if len(infos) > _MAX_NPZ_ARRAYS:
            raise CheckpointError(f"{path}: more than {_MAX_NPZ_ARRAYS} arrays")
        return {_array_name(info): _header(archive, info, path) for info in infos}


def read_npz(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Return the arrays of these names of an `.npz` file.

    Raises:
        CheckpointError: no such file, damaged, holding objects, or more than the memory that is free.
    """
    with reading(str(path), "not a valid .npz file", *_MALFORMED), zipfile.ZipFile(path) as archive:
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


def free_memory() -> int:
    """Return the bytes of memory that this process may still take: the machine's, or its control group's if fewer.

    Where the system does not say (it is not Linux), it is more than any file unpacks to.
    """
    free = [_MAX_NPZ_BYTES]
    with suppress(OSError):
        free += [
            int(kibibytes) << 10
            for kibibytes in re.findall(r"^MemAvailable:\s+(\d+)", _MEMORY.read_text(), re.MULTILINE)
        ]
    with suppress(OSError, ValueError):  # no limit is the word `max`
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        cached = re.findall(r"^inactive_file (\d+)", (_CONTROL_GROUP / "memory.stat").read_text(), re.MULTILINE)
        free.append(limit - int((_CONTROL_GROUP / "memory.current").read_text()) + sum(map(int, cached)))
    return max(min(free), 0)


def _array_name(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Tensor:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(member)
    # A header may claim more than the archive holds; that is refused before it is allocated.
    if dtype.hasobject or dtype.itemsize > 8 or math.prod(shape) * dtype.itemsize > info.file_size:
        raise CheckpointError(f"{path}: {info.filename} holds objects, text, or less than its header claims")
    return torch.empty(shape, device="meta")
