"""The files of a checkpoint on this machine: a folder, or a single file.

`Files.prepared` sees all tensors of a checkpoint, whatever file and format hold them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from torch import Tensor

from model.checkpoint.foreign_files import foreign_advice
from model.checkpoint.local_files import read_json, reading, resolved_part
from model.checkpoint.tensor_files import SUFFIXES, read_tensor_file
from model.checkpoint.tensors import digest_of
from model.checkpoint.unread_tensors import refuse_quantised, refuse_unread_tensors
from model.checkpoint.wrappers import left_out_notes, without_wrappers
from model.errors import CheckpointError
from model.images.listing import is_junk

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_FILE: Final = "pytorch_model.bin"
PICKLE_INDEX_FILE: Final = "pytorch_model.bin.index.json"
OPEN_CLIP_CONFIG: Final = "open_clip_config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
# Files that describe the model of a folder.
MODEL_FILES: Final = (CONFIG_FILE, ADAPTER_CONFIG, OPEN_CLIP_CONFIG)
SHARD: Final = re.compile(r"([^/]+)-\d{5}-of-(?!0{5})(\d{5})(\.safetensors|\.bin)")
# Buffers of integers that modules save with their weights.
_BUFFERS: Final = r"(.*\.)?(position_ids|num_batches_tracked|relative_position_index)"


class Files:
    """A folder on this machine that holds the files of a checkpoint.

    Attributes:
        source: the source as the operator wrote it.
        title: name of the folder, file or repository in messages.
        folder: path of the folder.
        revision: commit of a repository; None for a folder on this machine.
        is_remote: whether the files were downloaded; such files may not name local paths.
        digest: hash of the tensors, once they have been read.
        parent: outer folder, which gives the model its name.
        overlay: an adapter's files, whose name and preprocessing take precedence.
        merge: function that merges the adapter into the tensors.
        notes: where the files came from and, once the tensors are read, how they were renamed.
        assumed: choices about the head.
        read_names: names of the files that have been read.
        weights: names of files of weights in transformers' order of preference.
    """

    weights: tuple[str, ...] = (WEIGHTS_FILE, INDEX_FILE, PICKLE_FILE, PICKLE_INDEX_FILE)
    revision: str | None = None
    is_remote: bool = False
    digest: str = ""
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    parent: "Files | None" = None
    overlay: "Files | None" = None
    merge: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None

    def __init__(self, folder: Path, source: str) -> None:
        self.source = source
        self.title = str(folder)
        self.folder = folder
        self.read_names: set[str] = set()
        self._config: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """The model's name: the name of the adapter, the repository, or the folder.

        The names inside a config belong to the model that the training started from.
        """
        if self.overlay is not None:
            return self.overlay.name
        if self.parent is not None:
            return self.parent.name
        is_relative = self.folder.name in ("", "..")
        folder = self.folder.resolve() if is_relative else self.folder.absolute()
        # The hub's cache: models--owner--name/snapshots/COMMIT.
        repository = folder.parent.parent.name
        if folder.parent.name == "snapshots" and repository.startswith("models--"):
            return repository.removeprefix("models--").replace("--", "/")
        return folder.name or str(folder)

    def path(self, name: str) -> Path | None:
        """Return the resolved path of a file of the folder, or None if it does not exist.

        Raises:
            CheckpointError: the file may exist but cannot be read.
        """
        return resolved_part(self.folder, name, self.where(name))

    def is_on_disk(self, name: str) -> bool:
        """Return whether a file is on this machine, without fetching it."""
        return Files.path(self, name) is not None

    def where(self, name: str) -> str:
        """Return the name of a file in messages."""
        return f"{self.title}/{name}"

    def required(self, name: str) -> Path:
        """Return the path of a file, as `path` does; raise `CheckpointError` if it is missing."""
        path = self.path(name)
        if path is None:
            raise CheckpointError(f"{self.where(name)}: no such file")
        self.read_names.add(name)
        return path

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; raise `CheckpointError` if it holds anything else."""
        value = read_json(self.required(name), self.where(name))
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{self.where(name)}: expected an object: names and values in braces"
            )
        return value

    def subfolder(self, name: str) -> "Files":
        """Return the files of a subfolder; raise `CheckpointError` if it is outside the folder."""
        if not all(re.fullmatch(r"\w[\w.-]*", part) for part in name.split("/")):
            raise CheckpointError(f"{self.title}: {name!r:.100} is not the name of a subfolder")
        inner = self._within(name)
        inner.parent = self
        return inner

    def _within(self, name: str) -> "Files":
        return Files(self.folder / name, self.source)

    def models_within(self) -> list[str]:
        """Return the paths of the inner folders with a model."""
        paths = [PurePosixPath(name) for name in self.names()]
        return sorted(
            {str(path.parent) for path in paths if path.name in MODEL_FILES and path.parent.name}
        )

    def names(self) -> list[str]:
        """Return the sorted names of the files in the folder and its subfolders, without junk."""
        with reading(self.title):
            paths = [*self.folder.glob("*"), *self.folder.glob("*/*")]
            names = [path.relative_to(self.folder) for path in paths if path.is_file()]
        return sorted(name.as_posix() for name in names if not any(map(is_junk, name.parts)))

    def misnamed(self, name: str) -> str:
        """Return advice to rename a file, such as `X.json` or `x (1).json`; empty for others."""
        for other in self.names():
            if re.sub(r" ?\(\d+\)(?=\.)", "", other).lower() == name and other != name:
                return f"rename {other} to {name}; else "
        return ""

    @property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`; empty if the file does not exist."""
        if self._config is None:  # Python 3.11's `cached_property` shares one lock by all instances
            self._config = {} if self.path(CONFIG_FILE) is None else self.json(CONFIG_FILE)
        return self._config

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all tensors of the folder, as `prepared` does.

        Raises:
            CheckpointError: no weights, or as `prepared`.
        """
        return self.prepared(self._stored())

    def prepared(self, stored: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return stored tensors without wrappers, buffers and gradients, the adapter merged in.

        All readers get their tensors here. The head's tensors keep the names of the file.

        Raises:
            CheckpointError: they are only a part of a network, or the adapter does not fit.
        """
        unwrapped, notes = without_wrappers(stored, self.title)
        self.notes += notes
        refuse_unread_tensors(unwrapped, self.title)
        floats = {name: tensor for name, tensor in unwrapped.items() if tensor.is_floating_point()}
        others = {name: tensor for name, tensor in unwrapped.items() if name not in floats}
        tensors: Mapping[str, Tensor] = floats | self.without(others, _BUFFERS)
        if self.merge is not None:
            tensors = self.merge(tensors)
        # A pickled `nn.Parameter` asks for gradients.
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.digest = digest_of(tensors)
        return tensors

    def without(self, tensors: Mapping[str, Tensor], pattern: str) -> dict[str, Tensor]:
        """Remove the tensors whose names match a pattern, and note their names."""
        kept = {name: tensor for name, tensor in tensors.items() if not re.fullmatch(pattern, name)}
        self.notes += left_out_notes([name for name in tensors if name not in kept])
        return kept

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one file; raise `CheckpointError` if it holds anything else."""
        where = self.where(name)
        content = read_tensor_file(self.required(name), where)
        is_mapping = isinstance(content, Mapping)
        if is_mapping:
            refuse_quantised(content, where)
        if not is_mapping or not all(isinstance(tensor, Tensor) for tensor in content.values()):
            raise CheckpointError(
                f"{where}: expected a state dict of tensors, as torch.save(model.state_dict(), "
                "FILE) writes it: if training wrote this file, save its weights alone, or give the "
                "file itself instead of its folder"
            )
        return dict(content)

    def _stored(self) -> Mapping[str, Tensor]:
        """Return all tensors of the file or index that the config names, else of a usual one.

        Without either, return the tensors of all shards.
        """
        name = self._named_weights()
        if name is None:
            name = next((name for name in self.weights if self.path(name) is not None), None)
        if name is not None and name.endswith(".index.json"):
            return self._sharded(name)
        if name is not None:
            return self.part(name)
        names = self.names()
        shard = next(filter(None, map(SHARD.fullmatch, names)), None)
        if shard is not None:
            return self._parts(_complete_shards(shard, names, self.title))
        raise CheckpointError(
            f"{self.title}: no weights ({', '.join(self.weights[:-1])} or {self.weights[-1]}): "
            f"{self.misnamed(WEIGHTS_FILE)}{_remedy_without_weights(names)}"
        )

    def _named_weights(self) -> str | None:
        """Return the file of weights that a config of transformers names, if it does."""
        name = self.config.get("transformers_weights")
        if name is None:
            return None
        if not isinstance(name, str) or not name.endswith(
            (".safetensors", ".safetensors.index.json")
        ):
            raise CheckpointError(
                f"{self.where(CONFIG_FILE)}: transformers_weights {name!r:.100}: expected the name "
                "of a safetensors file or its index; save the weights so, or remove the field"
            )
        self.required(name)
        return name

    def _sharded(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of the shards that an index names."""
        where = self.where(name)
        suffix = ".bin" if name == PICKLE_INDEX_FILE else ".safetensors"
        index = self.json(name).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise CheckpointError(
                f"{where}: weight_map: expected an object from tensor to file name"
            )
        shards = sorted(set(index.values()))
        for shard in shards:
            if PureWindowsPath(shard).name != shard or not shard.endswith(suffix):
                raise CheckpointError(
                    f"{where}: {shard!r:.100} is not the name of a {suffix} file: the shards "
                    "are in the folder of the index, so write only their names into it"
                )
            if self.path(shard) is None:
                raise CheckpointError(
                    f"{where}: names {shard}, which is missing: copy or download the shard, too"
                )
        tensors = self._parts(shards)
        if tensors.keys() != index.keys():
            odd = min(tensors.keys() ^ index.keys())
            raise CheckpointError(
                f"{where}: {odd!r} is in the index or in the shards, but not in both"
            )
        return tensors

    def _parts(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors of all shards; refuse a tensor that two shards hold."""
        tensors: dict[str, Tensor] = {}
        for name in names:
            part = self.part(name)
            twice = tensors.keys() & part.keys()
            if twice:
                raise CheckpointError(
                    f"{self.where(name)}: {min(twice)!r:.100} is also in another shard: copy or "
                    "download all shards of one model again"
                )
            tensors |= part
        return tensors


def _complete_shards(shard: re.Match[str], names: Sequence[str], title: str) -> list[str]:
    """Return the names of all shards of a set without an index, derived from one shard's name."""
    start, count, suffix = shard.groups()
    expected = [f"{start}-{number + 1:05}-of-{count}{suffix}" for number in range(int(count))]
    present = set(filter(SHARD.fullmatch, names))
    missing = next((name for name in expected if name not in present), None)
    others = present.difference(expected)
    if missing is not None:
        raise CheckpointError(
            f"{title}: no weights but shards such as {shard[0]}, without {missing}: copy or "
            "download all shards, and their index"
        )
    if others:
        raise CheckpointError(
            f"{title}: holds {shard[0]} and {min(others)}, shards of two sets: remove the wrong "
            "ones, or add the index of the right ones"
        )
    return expected


def _remedy_without_weights(names: Sequence[str]) -> str:
    foreign = next(filter(foreign_advice, names), None)
    if foreign is not None:
        return f"{foreign} is {foreign_advice(foreign)}"
    files = [name for name in names if name.lower().endswith(SUFFIXES) and "/" not in name]
    if not files:
        return "copy or download them into the folder"
    return (
        f"it holds {', '.join(files[:5])}: rename the weights to {WEIGHTS_FILE} ({PICKLE_FILE} "
        "for a pickled state dict), or give that file instead of its folder"
    )


class SingleFile(Files):
    """A file of weights on this machine, without any other file.

    Attributes:
        file: path of the file.
    """

    def __init__(self, file: Path, source: str) -> None:
        super().__init__(file, source)
        self.file = file

    def is_on_disk(self, name: str) -> bool:
        """Return False: no other file is looked at."""
        return False

    def path(self, name: str) -> Path | None:
        """Return None: no other file is looked at."""
        return None
