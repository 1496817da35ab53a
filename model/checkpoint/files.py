"""Reading the files a checkpoint is made of, with every failure named in one line.

A reader sees `Files`: a folder, a single file or a hub repository, whose parts are opened by name.
"""

from __future__ import annotations

import json
import pickle
import struct
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model.errors import CheckpointError

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_FILE: Final = "pytorch_model.bin"
_MAX_JSON_BYTES: Final = 64 << 20
_MAX_SHARDS: Final = 1000

PICKLE_SUFFIXES: Final = (".pth", ".pt", ".bin")


class Files(ABC):
    """Where a checkpoint's parts are opened by name.

    Attributes:
        source: as the operator wrote it.
        revision: of a hub repository (a commit); None for what lies here.
    """

    source: str
    revision: str | None = None

    @abstractmethod
    def path(self, name: str) -> Path | None:
        """A local path of the part called `name`, or None where there is none.

        Raises:
            CheckpointError: it may exist but cannot be had.
        """

    @property
    @abstractmethod
    def place(self) -> str:
        """What messages call the whole: a folder, a file, a repository."""

    def where(self, name: str) -> str:
        """What messages call the part `name`."""
        return f"{self.place}/{name}"

    def required(self, name: str) -> Path:
        """As `path`, but a part that is missing is an error."""
        path = self.path(name)
        if path is None:
            raise CheckpointError(f"{self.where(name)}: no such file")
        return path

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object from the part `name`; see `read_json`."""
        return read_json(self.required(name), self.where(name))

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """`config.json`, or None where there is none."""
        return self.json(CONFIG_FILE) if self.path(CONFIG_FILE) is not None else None

    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors, whichever of the usual files hold them: safetensors, sharded, or a checked pickle.

        Raises:
            CheckpointError: no weights at all, or a file that is not what it should be.
        """
        path = self.path(WEIGHTS_FILE)
        if path is not None:
            return read_safetensors(path, self.where(WEIGHTS_FILE))
        if self.path(INDEX_FILE) is not None:
            return self._sharded()
        path = self.path(PICKLE_FILE)
        if path is not None:
            return read_pickle(path, self.where(PICKLE_FILE))
        raise CheckpointError(f"{self.place}: no weights ({WEIGHTS_FILE}, {INDEX_FILE} or {PICKLE_FILE})")

    def _sharded(self) -> dict[str, Tensor]:
        where = self.where(INDEX_FILE)
        index = self.json(INDEX_FILE).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
            raise CheckpointError(f"{where}: weight_map: expected an object from tensor to file name")
        shards = sorted(set(index.values()))
        if len(shards) > _MAX_SHARDS:
            raise CheckpointError(f"{where}: {len(shards)} shards are more than {_MAX_SHARDS}")
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            if PurePosixPath(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(f"{where}: {shard!r} is not the name of a safetensors file beside it")
            part = read_safetensors(self.required(shard), self.where(shard))
            twice = tensors.keys() & part.keys()
            if twice:
                raise CheckpointError(f"{self.where(shard)}: {min(twice)!r} is in another shard too")
            tensors.update(part)
        if tensors.keys() != index.keys():
            odd = min(tensors.keys() ^ index.keys())
            raise CheckpointError(f"{where}: {odd!r} is in the index or in the shards, but not in both")
        return tensors


class Folder(Files):
    """A folder on this machine."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder = folder
        self.source = source

    @property
    def place(self) -> str:
        """The folder's path."""
        return str(self.folder)

    def path(self, name: str) -> Path | None:
        """The path of `name` in the folder, where there is such a file."""
        path = self.folder / name
        return path if path.exists() else None


class SingleFile(Files):
    """One file of weights on this machine, without a config."""

    def __init__(self, file: Path, source: str) -> None:
        self.file = file
        self.source = source

    @property
    def place(self) -> str:
        """The file's path."""
        return str(self.file)

    def where(self, name: str) -> str:
        """There is only one part: the file."""
        return str(self.file)

    def path(self, name: str) -> Path | None:
        """None: beside the weights there is nothing."""
        return None

    @cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        suffix = self.file.suffix.lower()
        if suffix == ".safetensors":
            return read_safetensors(self.file)
        if suffix in PICKLE_SUFFIXES:
            return read_pickle(self.file)
        raise CheckpointError(f"{self.file}: expected .safetensors, {', '.join(PICKLE_SUFFIXES)} or .npz")

    def tensors(self) -> Mapping[str, Tensor]:
        """The file's tensors, read once."""
        return self._tensors


def read_json(path: Path, where: str | None = None) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: no such file, not JSON, or not an object.
    """
    value = read_json_value(path, where)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where or path}: holds a {type(value).__name__}, expected an object")
    return value


def read_json_value(path: Path, where: str | None = None) -> Any:
    """Any JSON value from a file.

    Raises:
        CheckpointError: no such file, or not JSON.
    """
    where = where or str(path)
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{where}: larger than {_MAX_JSON_BYTES} bytes")
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{where}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON: {first_line(error)}") from None


def read_safetensors(path: Path, where: str | None = None) -> dict[str, Tensor]:
    """All tensors of a safetensors file, as stored, on the CPU.

    Raises:
        CheckpointError: no such file, truncated or malformed.
    """
    where = where or str(path)
    try:
        return load_file(path, device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{where}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError, TypeError) as error:
        raise CheckpointError(f"{where}: not a valid safetensors file: {first_line(error)}") from None


def read_pickle(path: Path, where: str | None = None) -> dict[str, Tensor]:
    """The state dict of a file that `torch.save` wrote, read as data only: no code in it is run.

    A state dict may lie under `model`, `state_dict` or `model_state_dict` (as training scripts save
    it), and its names may start with `module.` (DistributedDataParallel) or `_orig_mod.` (torch.compile).

    Raises:
        CheckpointError: no such file, damaged, holding more than tensors, or no state dict.
    """
    where = where or str(path)
    try:
        with warnings.catch_warnings():
            # What it warns of (other pickle protocols, old formats) it then reads or refuses; a refusal is one line.
            warnings.simplefilter("ignore", UserWarning)
            value = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{where}: no such file") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{where}: refused, it is not plain tensors (weights_only): {_refused(error)}") from None
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror or error}") from None
    except (
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        AssertionError,
        OverflowError,
        RecursionError,
        MemoryError,
        ImportError,
        struct.error,
        zipfile.BadZipFile,
    ) as error:
        # torch's unpickler and zip reader give all of these on damaged files.
        raise CheckpointError(f"{where}: not a file that torch.save wrote: {first_line(error)}") from None
    return _state_dict(value, where)


def _refused(error: pickle.UnpicklingError) -> str:
    """The line of torch's long message that names what was refused."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (named or lines or ["unreadable"])[0][:300]


def _state_dict(value: Any, where: str) -> dict[str, Tensor]:
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping):
            value = value[key]
            break
    if not isinstance(value, Mapping) or not value:
        raise CheckpointError(f"{where}: holds a {type(value).__name__}, expected a state dict of tensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{where}: {name!r} holds a {type(tensor).__name__}, expected a tensor")
        tensors[name] = tensor.detach()
    for prefix in ("module.", "_orig_mod."):
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


class TensorSource:
    """Tensors under their file's own names, each to be taken once and by its expected shape.

    What a reader leaves is unexpected, unless its family lists it as unused. No arithmetic happens
    before a shape has been checked, so a hostile file cannot make a reader allocate.

    Args:
        tensors: as stored.
        where: what messages call the file.
        unused: whether a family knows a name and does not need it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], where: str, unused: Callable[[str], bool] | None = None) -> None:
        self.where = where
        self._left = {name: t for name, t in tensors.items() if unused is None or not unused(name)}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def names(self) -> Iterable[str]:
        """Names that were not taken yet."""
        return self._left.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor.

        Raises:
            CheckpointError: there is none of this name.
        """
        if name not in self._left:
            raise CheckpointError(f"{self.where}: missing key {name!r}")
        return tuple(self._left[name].shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor as float32, removed from what is left.

        Raises:
            CheckpointError: missing, of another shape, or not floating point.
        """
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(f"{self.where}: {name} has shape {list(found)}, expected {list(shape)}")
        return as_float32(self._left.pop(name), name, self.where)

    def finish(self) -> None:
        """Refuse what nobody took.

        Raises:
            CheckpointError: names the first tensor that is left.
        """
        if self._left:
            names = sorted(self._left)
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{self.where}: unexpected key {names[0]!r}{more}")


def as_float32(tensor: Tensor, name: str, where: str) -> Tensor:
    """A dense floating-point tensor as contiguous float32.

    Raises:
        CheckpointError: integers, complex numbers, sparse or quantised.
    """
    if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(f"{where}: {name} is {tensor.dtype}, expected dense floating point")
    return tensor.to(torch.float32).contiguous()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
