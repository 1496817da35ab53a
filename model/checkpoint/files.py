"""Sources of a checkpoint's parts on this machine: a folder or a single file; `hub` has a
repository.

All tensors of a checkpoint, whatever file and format hold them, are read by `Files.tensors`.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from torch import Tensor

from model.checkpoint.containers import Chosen, aside_notes, chosen_state_dict, without_wrappers
from model.checkpoint.incomplete import refuse_incomplete
from model.checkpoint.key_map import KeyMap
from model.checkpoint.local_files import read_json, reading, resolved_part
from model.checkpoint.tensor_files import read_tensor_file
from model.checkpoint.tensors import digest_of
from model.errors import CheckpointError

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_FILE: Final = "pytorch_model.bin"
PICKLE_INDEX_FILE: Final = "pytorch_model.bin.index.json"
# Files that say what a folder's model is.
OPEN_CLIP_CONFIG: Final = "open_clip_config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
# Buffers of integers that modules save beside their weights.
_BUFFERS: Final = r"(.*\.)?(position_ids|num_batches_tracked|relative_position_index)"
MODEL_FILES: Final = (CONFIG_FILE, ADAPTER_CONFIG, OPEN_CLIP_CONFIG)


class Files:
    """A folder on this machine, whose files are a checkpoint's parts.

    Attributes:
        source: as the operator wrote it.
        place: what messages call the whole: a folder, a file, a repository.
        folder: where the parts are.
        revision: of a hub repository (a commit); None for what lies here.
        digest: of the tensors, once they were read.
        parent: the folder that names this one as its model's, and whose name is the model's.
        overlay: an adapter's files, whose preprocessing comes before the base's.
        merge: merges the adapter into the tensors.
        notes: what was done to the names of the tensors, once they were read.
        assumed: what was chosen for an adapter's head.
        read_names: names of the parts that were read.
        weights: names of the files of weights, of which the first that is there is read.
    """

    weights: tuple[str, ...] = (
        WEIGHTS_FILE,
        INDEX_FILE,
        PICKLE_FILE,
        PICKLE_INDEX_FILE,
    )  # as transformers
    revision: str | None = None
    digest: str = ""
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    parent: "Files | None" = None
    overlay: "Files | None" = None
    merge: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None

    def __init__(self, folder: Path, source: str) -> None:
        self.source, self.place, self.folder = source, str(folder), folder
        self.read_names: set[str] = set()
        self._config: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """The model's name: the folder's, or the repository's where it came from a hub; an adapter
        has its own.

        The names that a config holds are those of the model that the training began with.
        """
        if self.overlay is not None:
            return self.overlay.name
        if self.parent is not None:
            return self.parent.name
        place = self.folder.resolve() if self.folder.name in ("", "..") else self.folder.absolute()
        repository = (
            place.parent.parent.name
        )  # of the hub's cache: models--owner--name/snapshots/COMMIT
        if place.parent.name == "snapshots" and repository.startswith("models--"):
            return repository.removeprefix("models--").replace("--", "/")
        return place.name or str(place)

    def path(self, name: str) -> Path | None:
        """Return the resolved path of the part called `name`, or None where there is none.

        Raises:
            CheckpointError: it may exist but cannot be had.
        """
        return resolved_part(self.folder, name, self.where(name))

    def is_on_disk(self, name: str) -> bool:
        """Return whether the part `name` is on this machine; nothing is fetched for it."""
        return Files.path(self, name) is not None

    def where(self, name: str) -> str:
        """Return the name of the part `name` in messages."""
        return f"{self.place}/{name}"

    def required(self, name: str) -> Path:
        """Return the path of a part, as `path` does; refuse a missing part."""
        path = self.path(name)
        if path is None:
            raise CheckpointError(f"{self.where(name)}: no such file")
        self.read_names.add(name)
        return path

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in the part `name`; CheckpointError where it holds none."""
        value = read_json(self.required(name), self.where(name))
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{self.where(name)}: expected an object: names and values in braces"
            )
        return value

    def subfolder(self, name: str) -> "Files":
        """Return the files of a folder within this one; CheckpointError if it leads out of it."""
        if not all(re.fullmatch(r"\w[\w.-]*", part) for part in name.split("/")):
            raise CheckpointError(
                f"{self.place}: {name!r:.100} is not the name of a folder within it"
            )
        inner = self._within(name)
        inner.parent = self
        return inner

    def _within(self, name: str) -> "Files":
        return Files(self.folder / name, self.source)

    def models_within(self) -> list[str]:
        """Return the names of the subfolders that hold a model."""
        with reading(self.place):
            folders = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        return [
            name
            for name in folders
            if any((self.folder / name / file).is_file() for file in MODEL_FILES)
        ]

    @property
    def config(self) -> dict[str, Any]:
        """`config.json`, empty where there is none."""
        if (
            self._config is None
        ):  # a `cached_property` of Python 3.11 has one lock for all instances
            self._config = {} if self.path(CONFIG_FILE) is None else self.json(CONFIG_FILE)
        return self._config

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all tensors, with an adapter merged into them if there is one.

        All readers get their tensors here, the head's under the names of the file.

        Raises:
            CheckpointError: no weights at all, a part of a network, or a file that is not what it
            should be.
        """
        stored, self.notes = without_wrappers(self._stored(), self.place)
        refuse_incomplete(stored, self.place)
        floats = {name: tensor for name, tensor in stored.items() if tensor.is_floating_point()}
        others = {name: tensor for name, tensor in stored.items() if name not in floats}
        stored = floats | self.without(others, _BUFFERS)
        tensors = stored if self.merge is None else self.merge(stored)
        self.digest = digest_of(tensors)
        return tensors

    def without(self, tensors: Mapping[str, Tensor], pattern: str) -> dict[str, Tensor]:
        """Return tensors without those whose names match a pattern, and note these."""
        kept = {name: tensor for name, tensor in tensors.items() if not re.fullmatch(pattern, name)}
        self.notes += aside_notes([name for name in tensors if name not in kept])
        return kept

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one file; CheckpointError where it holds something else."""
        where = self.where(name)
        held = read_tensor_file(self.required(name), where)
        if not isinstance(held, Mapping) or not all(
            isinstance(tensor, Tensor) for tensor in held.values()
        ):
            raise CheckpointError(
                f"{where}: expected a state dict of tensors, as torch.save(model.state_dict(), FILE) writes it"
            )
        return dict(held)

    def _stored(self) -> Mapping[str, Tensor]:
        """Return all tensors, whichever of the usual files hold them: safetensors, sharded, or a
        pickle.
        """
        name = next((name for name in self.weights if self.path(name) is not None), None)
        if name is None:
            raise CheckpointError(
                f"{self.place}: no weights ({', '.join(self.weights[:-1])} or {self.weights[-1]})"
            )
        return self._sharded(name) if name in (INDEX_FILE, PICKLE_INDEX_FILE) else self.part(name)

    def _sharded(self, name: str) -> dict[str, Tensor]:
        where = self.where(name)
        suffix = ".safetensors" if name == INDEX_FILE else ".bin"
        index = self.json(name).get("weight_map")
        if not isinstance(index, dict) or not all(
            isinstance(shard, str) for shard in index.values()
        ):
            raise CheckpointError(
                f"{where}: weight_map: expected an object from tensor to file name"
            )
        tensors: dict[str, Tensor] = {}
        for shard in sorted(set(index.values())):
            if PurePosixPath(shard).name != shard or not shard.endswith(suffix):
                raise CheckpointError(
                    f"{where}: {shard!r:.100} is not the name of a {suffix} file beside it"
                )
            tensors |= self.part(shard)
        if tensors.keys() != index.keys():
            odd = min(tensors.keys() ^ index.keys())
            raise CheckpointError(
                f"{where}: {odd!r} is in the index or in the shards, but not in both"
            )
        return tensors


class SingleFile(Files):
    """A state dict on this machine without a config.

    Attributes:
        file: where it is.
        keys: what `VIT_KEYS` says.
        chosen: the network within it, once it was read.
    """

    chosen: Chosen = Chosen({})

    def __init__(self, file: Path, source: str, keys: KeyMap) -> None:
        super().__init__(file, source)
        self.file, self.keys = file, keys

    def is_on_disk(self, name: str) -> bool:
        """Return False: beside the weights nothing is looked at."""
        return False

    def path(self, name: str) -> Path | None:
        """Return None: beside the weights there is nothing."""
        return None

    def _stored(self) -> Mapping[str, Tensor]:
        """Return the tensors without what training code puts before all their names."""
        self.chosen = chosen_state_dict(read_tensor_file(self.file), self.keys.weights, self.place)
        return self.chosen.tensors
