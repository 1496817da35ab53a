"""Local sources of a checkpoint's parts: a folder or a single file; `hub` has a repository."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from torch import Tensor

from model.checkpoint.containers import chosen_state_dict, unwrapped
from model.checkpoint.local_files import read_json, resolved_part
from model.checkpoint.refusals import check_names
from model.checkpoint.tensor_files.pickles import FOREIGN, read_pickle
from model.checkpoint.tensor_files.safetensors_files import read_safetensors
from model.checkpoint.tensor_files.zip_files import read_archive
from model.errors import CheckpointError

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_FILE: Final = "pytorch_model.bin"
_MAX_SHARDS: Final = 1000
_PICKLES: Final = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl")
_HEAD: Final = re.compile(r"(\w+_)?(heads?|classifier|fc)(\.\w+)*\.(weight|bias)")


class Files(ABC):
    """A source that opens a checkpoint's parts by name.

    Attributes:
        source: as the operator wrote it.
        place: what messages call the whole: a folder, a file, a repository.
        revision: of a hub repository (a commit); None for what lies here.
        overlay: an adapter's files, whose preprocessing comes before the base's.
        merge: merges the adapter into the tensors.
    """

    revision: str | None = None
    overlay: Files | None = None
    merge: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None

    def __init__(self, source: str, place: str) -> None:
        self.source = source
        self.place = place
        self._config: dict[str, Any] | None = None

    @abstractmethod
    def path(self, name: str) -> Path | None:
        """Return a local path of the part called `name`, or None where there is none.

        Raises:
            CheckpointError: it may exist but cannot be had.
        """

    def where(self, name: str) -> str:
        """Return the name of the part `name` in messages."""
        return f"{self.place}/{name}"

    def required(self, name: str) -> Path:
        """Return the path of a part, as `path` does; refuse a missing part."""
        path = self.path(name)
        if path is None:
            raise CheckpointError(f"{self.where(name)}: no such file")
        return path

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in the part `name`; CheckpointError where it holds none."""
        value = read_json(self.required(name), self.where(name))
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where(name)}: holds a {type(value).__name__}, expected an object")
        return value

    @property
    def config(self) -> dict[str, Any] | None:
        """Return `config.json`, or None where there is none."""
        # Before Python 3.12 a `cached_property` has one lock for all instances, and a disk may never answer one.
        if self._config is None and self.path(CONFIG_FILE) is not None:
            self._config = self.json(CONFIG_FILE)
        return self._config

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all tensors, with an adapter merged into them if there is one.

        Raises:
            CheckpointError: no weights at all, or a file that is not what it should be.
        """
        tensors = self._stored()
        return tensors if self.merge is None else self.merge(tensors)

    def _stored(self) -> Mapping[str, Tensor]:
        """Return all tensors, whichever of the usual files hold them: safetensors, sharded, or a checked pickle."""
        path = self.path(WEIGHTS_FILE)
        if path is not None:
            return read_safetensors(path, self.where(WEIGHTS_FILE))
        if self.path(INDEX_FILE) is not None:
            return self._sharded()
        path = self.path(PICKLE_FILE)
        if path is not None:
            where = self.where(PICKLE_FILE)
            return chosen_state_dict(read_pickle(path, where), None, where)[0]
        raise CheckpointError(f"{self.place}: no weights ({WEIGHTS_FILE}, {INDEX_FILE} or {PICKLE_FILE})")

    def _sharded(self) -> dict[str, Tensor]:
        where = self.where(INDEX_FILE)
        index = self.json(INDEX_FILE).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
            raise CheckpointError(f"{where}: weight_map: expected an object from tensor to file name")
        check_names(index, where)
        shards = sorted(set(index.values()))
        if len(shards) > _MAX_SHARDS:
            raise CheckpointError(f"{where}: {len(shards)} shards are more than {_MAX_SHARDS}")
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            if PurePosixPath(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(f"{where}: {shard!r} is not the name of a safetensors file beside it")
            read = read_safetensors(self.required(shard), self.where(shard))
            twice = tensors.keys() & read.keys()
            if twice:
                raise CheckpointError(f"{self.where(shard)}: {min(twice)!r} is in another shard too")
            tensors.update(read)
        if tensors.keys() != index.keys():
            odd = min(tensors.keys() ^ index.keys())
            raise CheckpointError(f"{where}: {odd!r} is in the index or in the shards, but not in both")
        return tensors


class Folder(Files):
    """A folder on this machine."""

    def __init__(self, folder: Path, source: str) -> None:
        super().__init__(source, str(folder))
        self.folder = folder

    def path(self, name: str) -> Path | None:
        """Return the resolved path of `name` in the folder, or None where there is no such file."""
        return resolved_part(self.folder, name, self.where(name))


class SingleFile(Files):
    """A state dict on this machine without a config: one file, or a backbone's and its head's in one folder.

    Attributes:
        notes: what was left aside of the files, once they were read.
        labels: by the class's index, of files that have them.
        file: the only one, or the backbone's.

    Args:
        weights: which copy of the network; see `containers.chosen_state_dict`.
    """

    def __init__(self, file: Path, source: str, weights: str | None = None, head: Path | None = None) -> None:
        super().__init__(source, str(file))
        self.file = file
        self.notes: tuple[str, ...] = ()
        self.labels: dict[str, str] | None = None
        self._weights, self._head = weights, head
        self._tensors: Mapping[str, Tensor] | None = None

    def where(self, name: str) -> str:
        """Return the path of the file, which is the only part."""
        return self.place

    def path(self, name: str) -> Path | None:
        """Return None: beside the weights there is nothing."""
        return None

    def _stored(self) -> Mapping[str, Tensor]:
        """Return the tensors, which are read once, without what training code puts before all their names."""
        if self._tensors is None:
            tensors, self.notes = self._read(self.file)
            if self._head is not None:
                head, notes = self._read(self._head)
                self.notes += notes
                own = [name for name in tensors if _HEAD.fullmatch(name)]
                if own:
                    raise CheckpointError(
                        f"{self.place}: has a head of its own, {own[0]!r}, and {self._head.name} beside it holds "
                        "another: name this file instead of its folder to read its own head, else save it without that"
                    )
                tensors = {**tensors, **{f"head.{name}": tensor for name, tensor in head.items()}}
            self._tensors = tensors
        return self._tensors

    def _read(self, file: Path) -> tuple[Mapping[str, Tensor], tuple[str, ...]]:
        where, suffix = str(file), file.suffix.lower()
        if suffix in FOREIGN:
            raise CheckpointError(f"{where}: {FOREIGN[suffix].format(repr(file.name))}")
        if suffix == ".safetensors":
            held: Any = read_safetensors(file)
        elif suffix in _PICKLES:
            held = read_pickle(file)
        elif suffix == ".mar":
            held, self.labels = read_archive(file)
        else:
            raise CheckpointError(f"{where}: expected .safetensors, {', '.join(_PICKLES)} or .npz")
        tensors, notes = chosen_state_dict(held, self._weights, where)
        return unwrapped(tensors, self._weights, where), notes
