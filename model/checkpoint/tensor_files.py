"""Files of tensors: safetensors and torch.save's. Code in them is never run.

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
_DISTRIBUTED: Final = (
    "a part of a distributed checkpoint: make one file of all parts, with python -m "
    "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE, and give that file"
)
_CONVERSION: Final = "a conversion for another program: give the model that it was converted from"
_ARCHIVE: Final = "an archive: unpack it, and give the folder or the file of weights in it"
_OTHER_LIBRARY: Final = (
    "weights of TensorFlow, Keras or Flax: give the torch weights of the same model, or convert "
    "them where both libraries are installed: transformers 4 does with from_pretrained(FOLDER, "
    "from_tf=True or from_flax=True).save_pretrained(NEW_FOLDER)"
)
_WEB_PAGE: Final = "a web page, not the file itself: download the file again, logged in if needed"
_WEIGHTS_BY_ADVICE: Final = {
    _GRAPH: ".onnx .xml .engine .plan .trt .tflite .mlmodel .mlpackage",
    _TORCHSCRIPT: ".ptl .jit .torchscript",
    _PROGRAM.format("torch.export", "torch.export.load({}).state_dict"): ".pt2",
    _ARCHIVE: ".zip .gz .tgz .xz .bz2 .7z .rar .mar",
    _OTHER_LIBRARY: ".h5 .hdf5 .keras .pb .msgpack",
    _CONVERSION: ".gguf .ot",
    _DISTRIBUTED: ".distcp",
}
# Weights in forms that are not read, by suffix, and the way from them to a state dict.
_FOREIGN_WEIGHTS: Final = {
    suffix: advice for advice, suffixes in _WEIGHTS_BY_ADVICE.items() for suffix in suffixes.split()
}
SUFFIXES: Final = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl", ".npz")
# Beginnings of files that have the name of another kind.
_FOREIGN_STARTS: Final = {
    b"<!DOCTYPE": _WEB_PAGE,
    b"<!doctype": _WEB_PAGE,
    b"<html": _WEB_PAGE,
    b"\x89HDF": _OTHER_LIBRARY,
    b"GGUF": _CONVERSION,
}
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
        for foreign, advice in _FOREIGN_STARTS.items():
            if start.startswith(foreign):
                raise CheckpointError(f"{where}: {advice}")
        # The names of both kinds are often mistaken; safetensors begins with a length and a brace.
        is_pickle = start.startswith((b"PK", b"\x80"))
        if start[8:9] == b"{" or (where.lower().endswith(".safetensors") and not is_pickle):
            return _read_safetensors(file, where)
        return _unpickled(file, where)


def foreign_advice(name: str) -> str:
    """Return the way from weights of another kind to a state dict; empty for a file of tensors."""
    path = PurePath(name)
    return _FOREIGN_WEIGHTS.get(path.suffix.lower(), "").format(repr(path.name))


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
        return _TORCHSCRIPT.format(repr(name))
    match = re.search(r"(?:GLOBAL|function|instantiate class) ([\w.]{1,200})", error)
    if match is None:
        return None
    advice = _TRANSFORMERS_ADVICE if match[1].startswith("transformers.") else _ADVICE
    return f"it holds the Python object {match[1]}; {advice}"
