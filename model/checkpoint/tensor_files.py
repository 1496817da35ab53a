"""Files of tensors: safetensors and torch.save's. Code in them is never run.

Each file is read whole into memory, so that a later change of the file changes nothing.
"""

import argparse
import pathlib
import pickle
import re
import struct
import zipfile
import zlib
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Final

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from model.checkpoint.foreign_files import TORCHSCRIPT, advice_at_start
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
SUFFIXES: Final = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl", ".npz")
DAMAGED: Final = (
    ", or damaged, or it holds more than arrays: compare its size and checksum with the original's"
)
_NOT_TORCHS: Final = (
    "not a file that torch.save wrote, but damaged, or of a program other than torch: compare its "
    "size and checksum with the original's, extract it if it is an archive, or save the weights "
    "where it was made with torch.save(STATE_DICT, FILE)"
)
# Exceptions of torch, safetensors, NumPy and the standard library for damaged files.
MALFORMED: Final = (
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
    zlib.error,
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
        where: name of the file in messages.

    Returns:
        Tensors by name, or the object that was given to `torch.save`.

    Raises:
        CheckpointError: the file does not exist, is damaged, or holds more than data.
    """
    where = where or str(path)
    with open_file(path, where) as file:
        start = file.peek(16)
        advice = advice_at_start(start)
        if advice:
            raise CheckpointError(f"{where}: {advice}")
        # The names of both kinds are often mistaken; safetensors begins with a length and a brace.
        is_pickle = start.startswith((b"PK", b"\x80"))
        if start[8:9] == b"{" or (where.lower().endswith(".safetensors") and not is_pickle):
            return _read_safetensors(file, where)
        return _unpickled(file, where)


def _read_safetensors(file: BinaryIO, where: str) -> dict[str, torch.Tensor]:
    with reading(where, f"not a valid safetensors file{DAMAGED}", *MALFORMED):
        return safetensors.torch.load(file.read())


def _unpickled(file: BinaryIO, where: str) -> Any:
    with reading(where, _NOT_TORCHS, *MALFORMED), torch.serialization.safe_globals(_DATA_TYPES):
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
        return TORCHSCRIPT.format(repr(name))
    match = re.search(r"(?:GLOBAL|function|instantiate class) ([\w.]{1,200})", error)
    if match is None:
        return None
    advice = _TRANSFORMERS_ADVICE if match[1].startswith("transformers.") else _ADVICE
    return f"it holds the Python object {match[1]}; {advice}"
