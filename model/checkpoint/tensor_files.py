"""Files of tensors: safetensors, what `torch.save` wrote, NumPy's `.npz`. No code in them is run.

Each is read whole into memory, so that a file that is overwritten afterwards changes nothing of
what was read.
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
_PROGRAM: Final = "a {} program, which is code: where it may run, save its weights alone with torch.save({}, FILE)"
_TORCHSCRIPT: Final = _PROGRAM.format("TorchScript", "torch.jit.load({}).state_dict()")
# What files of other kinds are, and how to get at a state dict; by suffix.
_FOREIGN: Final = {
    ".pt2": _PROGRAM.format("torch.export", "torch.export.load({}).state_dict"),
    ".toml": "a file of settings, not of weights: a map of keys is given as --keys {} (VIT_KEYS) beside --checkpoint "
    "FILE; settings of a model lie in the folder of --models",
    ".json": "a file of settings or labels, not of weights: give the folder that holds it and the weights; labels are "
    "given as --labels {} (VIT_LABELS) beside --checkpoint",
    ".mar": "an archive of TorchServe: unzip it, and give the file of weights in it; {} itself is not read",
    **dict.fromkeys(
        (".onnx", ".xml", ".engine", ".tflite", ".mlmodel"),
        "a graph made from a network, whose weights are no longer those of its layers: give what it was exported "
        "from, saved where it was trained with torch.save(model.state_dict(), FILE)",
    ),
}

SUFFIXES: Final = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl", ".npz")
_DAMAGED: Final = (
    ", or damaged, or it holds more than arrays: compare its size and checksum with the original's"
)
_NOT_TORCHS: Final = (
    "not a file that torch.save wrote, but damaged, or of a program other than torch: compare its size and checksum "
    "with the original's"
)
_POINTER: Final = b"version https://git-lfs"
# What torch, safetensors, NumPy and the standard library raise on damaged files.
_MALFORMED: Final = (
    *(
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        AssertionError,
        MemoryError,
    ),
    *(
        ImportError,
        ArithmeticError,
        pickle.PickleError,
        struct.error,
        zipfile.BadZipFile,
        SafetensorError,
    ),
)

_SCALAR: Final = np.float64(0).__reduce__()[0]
_ARRAY: Final = np.zeros(1).__reduce__()[0]
# What training scripts save beside tensors: values that hold data alone, by the names of NumPy 1
# and 2.
_BESIDE: Final[list[Any]] = [
    *(argparse.Namespace, pathlib.PosixPath, np.dtype, np.ndarray),
    *(
        type(np.dtype(kind))
        for kind in (
            "f2",
            "f4",
            "f8",
            "i1",
            "i2",
            "i4",
            "i8",
            "u1",
            "u2",
            "u4",
            "u8",
            "?",
            "S1",
            "U1",
        )
    ),
    *(
        _SCALAR,
        (_SCALAR, "numpy.core.multiarray.scalar"),
        _ARRAY,
        (_ARRAY, "numpy.core.multiarray._reconstruct"),
    ),
]


def read_tensor_file(path: Path, where: str | None = None) -> Any:
    """Return the content of a file of tensors, on the CPU, as stored: tensors by name, or what
    `torch.save` was given.

    Args:
        path: of the file.
        where: what messages call it; its suffix says which format it has.

    Raises:
        CheckpointError: no such file, a format that is not read, damaged, or holding more than
        data.
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
                f"{where}: a pointer of Git LFS and not the file itself: run git lfs pull beside it"
            )
        file.seek(0)
        return _parsed(file, suffix, where)


def _parsed(file: BinaryIO, suffix: str, where: str) -> Any:
    if suffix == ".safetensors":
        with reading(where, f"not a valid safetensors file{_DAMAGED}", *_MALFORMED):
            return safetensors.torch.load(file.read())
    if suffix == ".npz":
        with (
            reading(where, f"not a valid .npz file{_DAMAGED}", *_MALFORMED),
            np.load(file, allow_pickle=False) as arrays,
        ):
            return {
                name: torch.from_numpy(np.ascontiguousarray(array))
                for name, array in arrays.items()
            }
    with (
        reading(where, _NOT_TORCHS, *_MALFORMED),
        torch.serialization.safe_globals(_BESIDE),
    ):
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            advice = _advice(str(error), PurePath(where).name)
            if advice is None:
                raise
    raise CheckpointError(f"{where}: refused, it is not plain tensors: {advice}")


def _advice(error: str, name: str) -> str | None:
    """Return the object beside plain data that torch refused, and advice; None where the file is
    damaged.
    """
    if "TorchScript" in error:
        return _TORCHSCRIPT.format(repr(name))
    found = re.search(r"(?:GLOBAL|function|instantiate class) ([\w.]{1,200})", error)
    if found is None:
        return None
    advice = _TRANSFORMERS_ADVICE if found[1].startswith("transformers.") else _ADVICE
    return f"it holds the Python object {found[1]}; {advice}"
