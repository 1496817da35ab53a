"""Tensors from a file: safetensors, `torch.save`'s pickle read as data only, and NumPy's `.npz`."""

from __future__ import annotations

import argparse
import io
import json
import math
import pathlib
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from model.checkpoint.refusals import reading
from model.errors import CheckpointError

ARCHIVE_SUFFIX: Final = ".mar"
PICKLE_SUFFIXES: Final = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl")

_ADVICE: Final = (
    "no code from a file is run here: where it was made, save the weights alone with "
    "torch.save(model.state_dict(), FILE), or convert them to .safetensors"
)
_TRANSFORMERS_ADVICE: Final = (
    "no code from a file is run here: where it was made, save the model as a folder with "
    "model.save_pretrained(FOLDER) and processor.save_pretrained(FOLDER), and give that folder"
)
_PROGRAM: Final = "a {} program, which is code: where it may run, save its weights alone with torch.save({}, FILE)"
_TORCHSCRIPT: Final = _PROGRAM.format("TorchScript", "torch.jit.load({}).state_dict()")
FOREIGN: Final = {
    ".pt2": _PROGRAM.format("torch.export", "torch.export.load({}).state_dict"),
    **dict.fromkeys(
        (".onnx", ".xml", ".engine", ".tflite", ".mlmodel"),
        "a graph made from a network, whose weights are no longer those of its layers: give what it was exported "
        "from, saved where it was trained with torch.save(model.state_dict(), FILE)",
    ),
}
"""What files of other kinds are, and how to get at a state dict; by suffix."""
_POINTER: Final = b"version https://git-lfs"
_DATA: Final[list[Any]] = [
    argparse.Namespace,
    pathlib.PosixPath,
    np.dtype,
    *(type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"),
    # By the names that NumPy 1 and 2 write.
    (np.float64().__reduce__()[0], "numpy.core.multiarray.scalar"),
    (np.float64().__reduce__()[0], "numpy._core.multiarray.scalar"),
]
"""What training scripts save beside tensors, and what is made without running anything."""

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
    refuse_pointer(path, where or str(path))
    with reading(where or str(path), "not a valid safetensors file", SafetensorError, *_MALFORMED):
        return load_file(path, device="cpu")


def read_pickle(path: Path | io.BytesIO, where: str | None = None) -> Any:
    """Return what a file that `torch.save` wrote holds: tensors, numbers and text in mappings; no code in it is run.

    Raises:
        CheckpointError: no such file, damaged, or holding more than that.
    """
    where = where or str(path)
    with reading(where, "not a file that torch.save wrote", *_MALFORMED), warnings.catch_warnings():
        # What torch warns of (other pickle protocols, old formats) it then reads or refuses.
        warnings.simplefilter("ignore", UserWarning)
        if isinstance(path, Path):
            refuse_pointer(path, where)
        _refuse_packed(path, where)
        try:
            if isinstance(path, io.BytesIO):
                path.seek(0)
            with torch.serialization.safe_globals(_DATA):
                return torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            text = str(error)
            if isinstance(error, RuntimeError) and "weights_only" not in text:
                raise
            raise CheckpointError(f"{where}: refused, it is not plain tensors: {_found(text, where)}") from None


def read_archive(path: Path) -> tuple[Any, dict[str, str] | None]:
    """Return what the state dict of a TorchServe archive holds, and its labels by index or None; its code stays unread.

    Raises:
        CheckpointError: no such file, damaged, larger than the memory that is free, or as `read_pickle`.
    """
    with reading(str(path), "not an archive of TorchServe", *_MALFORMED), zipfile.ZipFile(path) as archive:
        if sum(info.file_size for info in archive.infolist()) > free_memory():
            raise CheckpointError(f"{path}: unpacks to more than the memory that is free")
        name = json.loads(archive.read("MAR-INF/MANIFEST.json"))["model"]["serializedFile"]
        weights, labels = archive.read(name), None
        if "index_to_name.json" in archive.namelist():
            named = json.loads(archive.read("index_to_name.json"))
            labels = {index: label[-1] if isinstance(label, list) else label for index, label in named.items()}
        if name.endswith(".safetensors"):
            return load(weights), labels
    return read_pickle(io.BytesIO(weights), f"{path}/{name}"), labels


def refuse_pointer(path: Path, where: str) -> None:
    """Refuse the few lines that Git LFS leaves in the place of a file that was not fetched."""
    with reading(where), path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(f"{where}: a pointer of Git LFS and not the file itself: run git lfs pull beside it")


def _refuse_packed(path: Path | io.BytesIO, where: str) -> None:
    """Refuse an archive that unpacks to more than itself: torch packs nothing, but unpacks what others did."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
        if size > (path.stat().st_size if isinstance(path, Path) else path.getbuffer().nbytes):
            raise CheckpointError(f"{where}: unpacks to {size} bytes, more than it has: torch.save packs nothing")


def _found(text: str, where: str) -> str:
    """Return what a file holds instead of plain tensors, from torch's message, and advice that is not torch's."""
    if "TorchScript" in text:
        return _TORCHSCRIPT.format(repr(Path(where).name))
    named = re.search(r"GLOBAL ([\w.]{1,200})", text)
    if named is None:
        return f"damaged, or of a program other than torch; {_ADVICE}"
    advice = _TRANSFORMERS_ADVICE if named[1].startswith("transformers.") else _ADVICE
    return f"it holds the Python object {named[1]}; {advice}"


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
