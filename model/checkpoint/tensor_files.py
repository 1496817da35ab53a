"""Files of tensors: safetensors, torch.save's, and NumPy's `.npz`. Code in them is never run.

Each file is read whole into memory, so that a later change of the file changes nothing.
"""

import argparse
import pathlib
import pickle
import re
import struct
import zipfile
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Final

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from model.checkpoint.local_files import open_file, reading
from model.errors import CheckpointError

_ADVICE: Final = (
    "no code from a file is run here: where it was made, save the weights alone with "
    "torch.save(model.state_dict(), FILE), or convert them to .safetensors"
)
_TRANSFORMERS_ADVICE: Final = (
    "no code from a file is run here: where it was made, save the model as a folder with "
    "model.save_pretrained(FOLDER) and processor.save_pretrained(FOLDER), and give that folder"
)
_PROGRAM: Final = (
    "a {} program, which is code: where it may run, save its weights alone with "
    "torch.save({}, FILE)"
)
_TORCHSCRIPT: Final = _PROGRAM.format("TorchScript", "torch.jit.load({}).state_dict()")
_GRAPH: Final = (
    "a graph made from a network, whose weights are no longer those of its layers: give the model "
    "that it was exported from, saved where it was trained with torch.save(model.state_dict(), "
    "FILE)"
)
# Other kinds of files by suffix, and the way from them to a state dict.
_FOREIGN: Final = {
    ".pt2": _PROGRAM.format("torch.export", "torch.export.load({}).state_dict"),
    ".toml": (
        "a file of settings, not of weights: give a map of keys as --keys {} (VIT_KEYS) with "
        "--checkpoint FILE; settings of a model belong into the folder of --models"
    ),
    ".json": (
        "a file of settings or labels, not of weights: give the folder that holds it and the "
        "weights; give labels as --labels {} (VIT_LABELS) with --checkpoint"
    ),
    ".mar": (
        "an archive of TorchServe: unzip it, and give the file of weights in it; {} itself is not "
        "read"
    ),
    ".onnx": _GRAPH,
    ".xml": _GRAPH,
    ".engine": _GRAPH,
    ".tflite": _GRAPH,
    ".mlmodel": _GRAPH,
}

SUFFIXES: Final = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl", ".npz")
_DAMAGED: Final = (
    ", or damaged, or it holds more than arrays: compare its size and checksum with the original's"
)
_NOT_TORCHS: Final = (
    "not a file that torch.save wrote, but damaged, or of a program other than torch: compare its "
    "size and checksum with the original's"
)
_POINTER: Final = b"version https://git-lfs"
# Exceptions of torch, safetensors, NumPy and the standard library for damaged files.
_MALFORMED: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
    pickle.PickleError,
    struct.error,
    zipfile.BadZipFile,
)

_SCALAR: Final = np.float64(0).__reduce__()[0]
_ARRAY: Final = np.zeros(1).__reduce__()[0]
_NUMPY_TYPES: Final = "f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 ? S1 U1"
# Types that training scripts save with tensors and that hold only data, under the names of NumPy 1
# and 2.
_DATA_TYPES: Final[list[Any]] = [
    argparse.Namespace,
    pathlib.PosixPath,
    np.dtype,
    np.ndarray,
    *(type(np.dtype(kind)) for kind in _NUMPY_TYPES.split()),
    _SCALAR,
    (_SCALAR, "numpy.core.multiarray.scalar"),
    _ARRAY,
    (_ARRAY, "numpy.core.multiarray._reconstruct"),
]


def read_tensor_file(path: Path, where: str | None = None) -> Any:
    """Return the content of a file of tensors as it was stored, on the CPU.

    Args:
        path: path of the file.
        where: name of the file in messages; its suffix tells the format.

    Returns:
        Tensors by name, or the object that was given to `torch.save`.

    Raises:
        CheckpointError: the file does not exist, its format is not read, it is damaged, or it holds
            more than data.
    """
    where = where or str(path)
    suffix = PurePath(where).suffix.lower()
    if suffix in _FOREIGN:
        raise CheckpointError(f"{where}: {_FOREIGN[suffix].format(repr(PurePath(where).name))}")
    if suffix not in SUFFIXES:
        raise CheckpointError(f"{where}: expected one of {', '.join(SUFFIXES)}")
    with open_file(path, where) as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(
                f"{where}: a pointer of Git LFS and not the file itself: run git lfs pull in its "
                "folder"
            )
        file.seek(0)
        if suffix == ".safetensors":
            return _read_safetensors(file, where)
        if suffix == ".npz":
            return _read_npz(file, where)
        return _unpickled(file, where)


def _read_safetensors(file: BinaryIO, where: str) -> dict[str, torch.Tensor]:
    with reading(where, f"not a valid safetensors file{_DAMAGED}", *_MALFORMED):
        return safetensors.torch.load(file.read())


def _read_npz(file: BinaryIO, where: str) -> dict[str, torch.Tensor]:
    with (
        reading(where, f"not a valid .npz file{_DAMAGED}", *_MALFORMED),
        np.load(file, allow_pickle=False) as arrays,
    ):
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()
        }


def _unpickled(file: BinaryIO, where: str) -> Any:
    with reading(where, _NOT_TORCHS, *_MALFORMED), torch.serialization.safe_globals(_DATA_TYPES):
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            advice = _advice(str(error), PurePath(where).name)
            if advice is None:
                raise
    raise CheckpointError(f"{where}: refused, it is not plain tensors: {advice}")


def _advice(error: str, name: str) -> str | None:
    """Return the object that torch refused to unpickle, with advice; None for a damaged file."""
    if "TorchScript" in error:
        return _TORCHSCRIPT.format(repr(name))
    match = re.search(r"(?:GLOBAL|function|instantiate class) ([\w.]{1,200})", error)
    if match is None:
        return None
    advice = _TRANSFORMERS_ADVICE if match[1].startswith("transformers.") else _ADVICE
    return f"it holds the Python object {match[1]}; {advice}"
