"""What `torch.save` wrote, read as data: tensors, numbers and text in mappings.

The stack machine is that of the standard library, without the steps that make or change objects. The names that a
file may look up are those of `_KNOWN`: functions of this file, and types of numbers. So nothing of a file is ever run,
and what it costs is bounded by its size: a tensor lies within its storage, and a storage within the file.

Source of the two formats: torch/serialization.py, `_load` (a ZIP archive) and `_legacy_load` (pickles, then storages).
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Callable
from pathlib import Path, PurePath
from types import FunctionType
from typing import Any, BinaryIO, ClassVar, Final

import torch
from torch import Tensor

from model.checkpoint.local_files import open_file
from model.checkpoint.refusals import reading
from model.checkpoint.tensor_files.opened import (
    MALFORMED,
    MAX_DIMENSIONS,
    is_count,
    open_zip,
    read_bytes,
    refuse_beyond_memory,
    refuse_pointer,
    stored_place,
)
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
FOREIGN: Final = {
    ".pt2": _PROGRAM.format("torch.export", "torch.export.load({}).state_dict"),
    **dict.fromkeys(
        (".onnx", ".xml", ".engine", ".tflite", ".mlmodel"),
        "a graph made from a network, whose weights are no longer those of its layers: give what it was exported "
        "from, saved where it was trained with torch.save(model.state_dict(), FILE)",
    ),
}
"""What files of other kinds are, and how to get at a state dict; by suffix."""

_MAX_PICKLE: Final = 16 << 20
"""Bytes of a file beside its storages: a network of 1,000 tensors has 200 KB."""
_MAX_READS: Final = 2_000_000
"""Steps and their arguments: each makes up to 120 bytes of objects, and takes a microsecond."""
_ZIP: Final = b"PK\3\4"
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001


_FORBIDDEN: Final = frozenset(
    {pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID}
    | {
        pickle.PUT,
        pickle.GET,
        pickle.EMPTY_SET,
        pickle.ADDITEMS,
        pickle.FROZENSET,
        pickle.NEXT_BUFFER,
        pickle.READONLY_BUFFER,
    }
)
"""Steps that make objects, or number them, in ways that `torch.save` does not."""


class _TooLarge(Exception):
    """A tensor has this shape."""


class Unread:
    """Stands for an object that is no part of a network: made of anything, it holds nothing."""

    __slots__ = ()

    def __init__(self, *_: object) -> None:
        pass


def _mapping(*_: object) -> dict[Any, Any]:
    return {}


def _tensor(
    storage: Tensor | None, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: object
) -> Tensor | None:
    """Return a view of a storage that lies within it and is not larger, or None where storages are not read yet.

    `rest` is requires_grad, hooks and, of the conjugate or negative view that no network is saved as, metadata.
    """
    if storage is None:
        return None
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or len(size) > MAX_DIMENSIONS or not all(map(is_count, numbers)):
        raise ValueError("a tensor of no shape")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else -1
    if last >= storage.numel() or math.prod(size) > storage.numel():
        raise _TooLarge(str(list(size)))
    if any(rest[2:]):
        raise ValueError("a view that stands for other numbers")
    return storage.as_strided(size, stride, offset)


def _typed(storage: Tensor | None, *arguments: Any) -> Tensor | None:
    *view, dtype = arguments[:6]
    return _tensor(None if storage is None else storage.view(dtype), *view, *arguments[6:])


def _parameter(data: object, *_: object) -> object:
    return data


def _from_type(rebuild: object, _type: object, arguments: tuple[Any, ...], *_: object) -> object:
    if rebuild not in (_tensor, _typed, _parameter):
        raise ValueError("a tensor of a class of its own")
    return rebuild(*arguments)


_STORAGES: Final = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
_DTYPES: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_UNREAD: Final = """
torch.nn.parameter.Parameter torch.Size torch.device torch.serialization._get_layout
collections.Counter argparse.Namespace pathlib.PosixPath pathlib.WindowsPath _codecs.encode
builtins.set builtins.bytearray builtins.complex builtins.list builtins.dict builtins.int builtins.float
__builtin__.set __builtin__.bytearray __builtin__.complex __builtin__.list __builtin__.dict
numpy.dtype numpy.ndarray numpy.core.multiarray.scalar numpy._core.multiarray.scalar
numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct
"""
"""What training scripts save beside tensors."""
_KNOWN: Final[dict[str, Any]] = {
    **_DTYPES,
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _mapping,
    **dict.fromkeys(_UNREAD.split(), Unread),
}
"""What a file may look up; NumPy is called by the names that its versions 1 and 2 write."""


class _Steps(io.BytesIO):
    """The bytes of a pickle, of which every step reads one or several times."""

    left = _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"more than {_MAX_READS:,} steps beside its tensors")
        return super().read(size)


class _Foreign(Exception):
    """A pickle looks up this name."""


class _Unpickler(pickle._Unpickler):
    """Gives plain data: no name beyond `_KNOWN`, no object but `Unread`, no key that takes long to compare.

    Args:
        file: a pickle.
        storage: returns the numbers of a storage by type, key and count, or None where they cannot be read yet.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: _Steps, storage: Callable[[torch.dtype, str, int], Tensor | None]) -> None:
        super().__init__(file, encoding="utf-8")
        self._steps, self._storage = file, storage

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        known = _KNOWN.get(f"{module}.{name}")
        if known is None:
            raise _Foreign(f"{module}.{name}")
        return known

    def persistent_load(self, pid: Any) -> Tensor | None:
        """Return the numbers of a storage."""
        kind, dtype, key, _, count, *view = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str or any(view):
            raise ValueError("a storage that is none")
        if not is_count(count):
            raise ValueError("a storage of no size")
        return self._storage(dtype, key, count)

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        if not (function is Unread or isinstance(function, FunctionType)) or type(arguments) is not tuple:
            raise ValueError("a step that calls what is no function")
        self.stack[-1] = function(*arguments)

    def _build(self) -> None:
        self.stack.pop()
        if not isinstance(self.stack[-1], Unread | dict | Tensor | None):
            raise ValueError("a step that changes an object")

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is dict:
            target.update((_plain(key), value) for key, value in zip(items[::2], items[1::2], strict=True))
        elif not isinstance(target, Unread):
            raise ValueError("keys of what is no mapping")

    def _set_one(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._set(items)

    def _dictionary(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self._set(items)

    dispatch: ClassVar[dict[int, Any]] = {
        code: step for code, step in pickle._Unpickler.dispatch.items() if bytes((code,)) not in _FORBIDDEN
    } | {
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _reduce,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _set_one,
        pickle.SETITEMS[0]: lambda self: self._set(self.pop_mark()),
        pickle.DICT[0]: _dictionary,
        # A frame's length: what is in it is read from the file all the same, and counted.
        pickle.FRAME[0]: lambda self: self._steps.read(8),
        # The library's own step makes room for as many bytes as it claims, and then reads them.
        pickle.BYTEARRAY8[0]: pickle._Unpickler.dispatch[pickle.BINBYTES8[0]],
    }


def _plain(key: object) -> object:
    """Return a key, or an object in its place: the hash of nested tuples or of chosen numbers can take for ever."""
    return key if type(key) is str or is_count(key) else Unread()


def read_pickle(path: Path, where: str | None = None) -> Any:
    """Return what a file that `torch.save` wrote holds: tensors, numbers and text in mappings; no code in it is run.

    Raises:
        CheckpointError: no such file, damaged, holding more than that, or larger than the memory that is free.
    """
    where = where or str(path)
    with open_file(path, where) as file:
        return unpickled(file, where)


def unpickled(file: BinaryIO, where: str) -> Any:
    """Return what an open file holds, as `read_pickle`."""
    with reading(where, "not a file that torch.save wrote, but damaged, or of a program other than torch", *MALFORMED):
        refuse_pointer(file, where)
        refuse_beyond_memory(file, where)
        try:
            return _unzipped(file, where) if file.read(len(_ZIP)) == _ZIP else _legacy(file)
        except _Foreign as error:
            raise CheckpointError(f"{where}: refused, it is not plain tensors: {_found(str(error))}") from None
        except _TooLarge as error:
            raise CheckpointError(f"{where}: a tensor has shape {error}, more than the file holds") from None


def _unzipped(file: BinaryIO, where: str) -> Any:
    archive = open_zip(file)
    members = {info.filename: info for info in archive.infolist()}
    if any(PurePath(name).name == "constants.pkl" for name in members):
        advice = _TORCHSCRIPT.format(repr(PurePath(where).name))
        raise CheckpointError(f"{where}: refused, it is not plain tensors: {advice}")
    size, total = sum(info.file_size for info in members.values()), file.seek(0, io.SEEK_END)
    if size > total:
        raise CheckpointError(f"{where}: unpacks to {size} bytes, more than it has: torch.save packs nothing")
    names = [name for name in members if PurePath(name).name == "data.pkl"]
    if len(names) != 1:
        raise ValueError(f"{len(names)} parts of the name data.pkl, expected one")
    root = names[0].removesuffix("data.pkl")
    storages: dict[str, Tensor] = {}

    def member(name: str, most: int = total) -> Tensor:
        if members[name].file_size > most:
            raise ValueError(f"{members[name].file_size} bytes of {name!r:.100}")
        file.seek(stored_place(file, members[name]))
        return read_bytes(file, members[name].file_size)

    def storage(dtype: torch.dtype, key: str, count: int) -> Tensor:
        if key not in storages:
            storages[key] = member(f"{root}data/{key}")
        return _numbers(storages[key], dtype, count)

    if f"{root}byteorder" in members and bytes(member(f"{root}byteorder", 10).tolist()) != b"little":
        raise ValueError("written on a machine of another byte order")
    return _Unpickler(_Steps(member(names[0], _MAX_PICKLE).numpy().tobytes()), storage).load()


def _legacy(file: BinaryIO) -> Any:
    """Return what a file of before 2020 holds: it is unpickled twice, as the storages stand after the pickles."""
    file.seek(0)
    steps = _Steps(file.read(_MAX_PICKLE))
    types: dict[str, torch.dtype] = {}

    def note(dtype: torch.dtype, key: str, _: int) -> None:
        types[key] = dtype

    if _Unpickler(steps, note).load() != _MAGIC or _Unpickler(steps, note).load() != _PROTOCOL:
        raise ValueError("neither an archive nor a pickle of torch")
    _Unpickler(steps, note).load()
    start = steps.tell()
    _Unpickler(steps, note).load()
    storages: dict[str, Tensor] = {}
    keys = _Unpickler(steps, note).load()
    file.seek(steps.tell())
    for key in keys:
        if type(key) is not str:  # whose hash takes no time
            raise ValueError("a storage of no name")
        (count,) = struct.unpack("<q", file.read(8))
        size, place = count * types[key].itemsize, file.tell()
        if not 0 <= size <= file.seek(0, io.SEEK_END) - place or key in storages:
            raise ValueError(f"a storage of {count} numbers, more than the file holds")
        file.seek(place)
        storages[key] = read_bytes(file, size)
    steps.seek(start)
    return _Unpickler(steps, lambda dtype, key, count: _numbers(storages[key], dtype, count)).load()


def _numbers(storage: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    if count * dtype.itemsize > storage.numel():
        raise ValueError(f"a storage of {count} numbers, more than the file holds")
    return storage[: count * dtype.itemsize].view(dtype)


def _found(name: str) -> str:
    """Return what a file holds instead of plain tensors, and advice."""
    if name.startswith("torch._utils._rebuild_"):
        return f"it holds sparse, quantised or other tensors that are not dense ({name:.200}); {_ADVICE}"
    advice = _TRANSFORMERS_ADVICE if name.startswith("transformers.") else _ADVICE
    return f"it holds the Python object {name:.200}; {advice}"
