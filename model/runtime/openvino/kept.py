"""Graphs that are kept on disk, so that a later start needs neither torch nor the tensors.

    FOLDER/KEY/manifest.json          the graph's sources and outputs
              /graph.xml, .bin        the graph, in float32
              /reference.safetensors  torch's outputs, which each later start compares with its own
              /head.safetensors       the head's weights, for a process that has the same backbone

An entry has no graph but a head if another loaded model had the backbone when it was written.

The key is a hash of every setting, version and fact of the machine that the graph depends on, and
not of runtime options such as the number of threads. The manifest names every file that was read
for the checkpoint, with its hash: if one differs now, the graph is made again. An entry is written
under a temporary name, then renamed, and never changed, because processes map it into memory. See
docs/decisions/kept-graphs.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
from pydantic import BaseModel, ConfigDict
from safetensors.numpy import load_file, save_file

from model.description import Description
from model.errors import first_line
from model.heads import Head
from model.runtime.batch_request import BatchRequest, GraphKind
from model.runtime.openvino.fingerprint import code_digest, digest, file_times, machine, versions
from model.runtime.openvino.network import NetworkGraph, core, openvino_package

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.checkpoint.local_files import Signature

logger = logging.getLogger(__name__)

T = TypeVar("T", bound="NetworkGraph | None")

# Most bytes of all entries together; the least recently used go first.
LIMIT: Final = 4 << 30

_MANIFEST: Final = "manifest.json"
_GRAPH: Final = "graph.xml"
_REFERENCE: Final = "reference.safetensors"
_HEAD: Final = "head.safetensors"


class Manifest(BaseModel):
    """The description of an entry, in its folder.

    Attributes:
        key: the text that `KeptEntry` hashes.
        files: the hash of each file that was read, and of the names in each folder; None for a
            path that does not exist.
        times: size and time of change of these files; unchanged ones are not hashed again.
        backbone: see `model.checkpoint.checkpoint`.
        graph: hashes of the entry's other files.
        outputs: see `NetworkGraph`.
        kind: kind of the graph; see `BatchRequest.of_graph`.
        checkpoint: the model.
        parameters: number of its parameters.
        dtype: the dtype in which the graph agreed with torch.
        largest_layer: see `model.network.library.largest_layer`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    files: dict[str, str | None]
    times: dict[str, tuple[int, int]]
    backbone: str
    graph: dict[str, str]
    outputs: tuple[str, ...] = ()
    kind: GraphKind = "plain"
    checkpoint: Description
    parameters: int
    dtype: str
    largest_layer: int

    def changed_file(self, *, but: str = "") -> str | None:
        """Return the path of a file whose content has changed, or None.

        Args:
            but: name of files that may change.
        """
        unchanged = {path for path, times in self.times.items() if times == file_times(path)}
        for name, known_digest in self.files.items():
            path = Path(name)
            if name not in unchanged and path.name != but and digest(path) != known_digest:
                return name
        return None


class KeptEntry:
    """The graphs of one model with its settings, in a folder of entries.

    Args:
        folder: folder of all entries; created when something is kept.
        settings: settings that an answer depends on, by name.

    Attributes:
        facts: the text, in JSON, that the key is a hash of.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self._folder = folder
        facts = {
            "settings": dict(settings),
            "versions": versions(),
            "code": code_digest(),
            "machine": machine(),
        }
        self.facts = json.dumps(facts, sort_keys=True, default=str)

    def path(self, kind: GraphKind = "plain") -> Path:
        """Return the folder of a graph."""
        return self._folder / hashlib.sha256(f"{self.facts}{kind}".encode()).hexdigest()[:40]

    def manifest(self, kind: GraphKind = "plain") -> Manifest | None:
        """Return the manifest of a usable graph; if it cannot be used, the log says why."""
        path = self.path(kind)
        if not path.exists():
            return None
        try:
            _require_own(self._folder)
            _require_own(path)
            manifest = Manifest.model_validate_json((path / _MANIFEST).read_bytes())
            digests = {name: digest(path / name) for name in manifest.graph}
            if manifest.key != self.facts or digests != manifest.graph:
                raise ValueError("its files differ from those that were written")
            changed = manifest.changed_file()
            if changed:
                logger.info("%s has changed: the graph is made again", changed)
                return None
            with suppress(OSError):  # the folder may be read-only
                os.utime(path)
        except (OSError, RuntimeError, ValueError) as error:
            _warn_unusable(path, error)
            return None
        return manifest

    def load(
        self, manifest: Manifest | None = None, kind: GraphKind = "plain"
    ) -> tuple[Manifest, NetworkGraph] | None:
        """Return a kept graph and its manifest; None if it cannot be used or only a head is kept.

        Args:
            manifest: the result of `manifest`, if the caller has just read it.
            kind: the graph.
        """
        manifest = manifest or self.manifest(kind)
        if manifest is None or _GRAPH not in manifest.graph:
            return None
        path = self.path(kind)
        try:
            request = BatchRequest.of_graph(manifest.kind, manifest.checkpoint.config)
            reference = load_file(path / _REFERENCE)
            model = core().read_model(path / _GRAPH)  # maps the weights and does not copy them
        except (OSError, RuntimeError, ValueError) as error:
            _warn_unusable(path, error)
            return None
        return manifest, NetworkGraph(model, manifest.outputs, request, reference)

    def head(self, manifest: Manifest) -> Head | None:
        """Return the kept head; None if the entry lacks a head.

        Raises:
            OSError, RuntimeError: it cannot be read.
        """
        if _HEAD not in manifest.graph:
            return None
        arrays = load_file(self.path() / _HEAD)
        return replace(manifest.checkpoint.head, weight=arrays["weight"], bias=arrays["bias"])

    def put(
        self, graph: NetworkGraph | None, facts: Mapping[str, object], head: Head | None
    ) -> NetworkGraph | None:
        """Write a graph and its head to their folder, and return the graph as read from there.

        Args:
            graph: None keeps only the head.
            facts: the fields of `Manifest` that neither the graph nor this entry determines.
            head: the checkpoint's own, if any.

        Raises:
            OSError, RuntimeError, ValueError: it cannot be written, or the folder belongs to
                another user.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(self._folder)
        path = self.path("plain" if graph is None else graph.request.graph_kind)
        # Writers lock this file; the kernel unlocks it when a process ends.
        with (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for _, _, abandoned in self._entries(r"\..*"):  # left by a killed process
                shutil.rmtree(abandoned, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=self._folder) as name:
                written = Path(name) / path.name
                written.mkdir(mode=0o700)
                self._write(written, graph, facts, head)
                self._make_room(_size(written))
                shutil.rmtree(path, ignore_errors=True)
                written.rename(path)
        if graph is None:
            return None
        return graph._replace(model=core().read_model(path / _GRAPH))

    def _write(
        self,
        folder: Path,
        graph: NetworkGraph | None,
        facts: Mapping[str, object],
        head: Head | None,
    ) -> None:
        """Write the files of an entry; for the arguments see `put`."""
        fields: dict[str, object] = {"key": self.facts, **facts}
        if graph is not None:
            openvino_package().save_model(graph.model, folder / _GRAPH, compress_to_fp16=False)
            save_file(graph.reference, folder / _REFERENCE)
            fields |= {"kind": graph.request.graph_kind, "outputs": graph.outputs}
        if head is not None and head.weight is not None:
            bias = np.asarray(head.bias, np.float32)
            save_file({"weight": head.weight, "bias": bias}, folder / _HEAD)
        fields["graph"] = {file.name: digest(file) for file in folder.iterdir()}
        (folder / _MANIFEST).write_text(Manifest.model_validate(fields).model_dump_json())

    def remove(self, kind: GraphKind) -> None:
        """Remove a graph, whose outputs turned out to differ from torch's."""
        shutil.rmtree(self.path(kind), ignore_errors=True)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used entries until `size` more bytes fit.

        Raises:
            OSError: they cannot fit.
        """
        if size > LIMIT or size > shutil.disk_usage(self._folder).free // 2:
            raise OSError(f"{size >> 20} MiB are too much for {self._folder}")
        entries = sorted(self._entries("[0-9a-f]{40}"))
        total = size + sum(entry_size for _, entry_size, _ in entries)
        for _, entry_size, path in entries:
            if total > LIMIT:
                shutil.rmtree(path, ignore_errors=True)
                total -= entry_size

    def _entries(self, name_pattern: str) -> Iterator[tuple[float, int, Path]]:
        """Give time of last use, bytes and folder of each entry whose name matches a pattern."""
        for path in self._folder.iterdir():
            if re.fullmatch(name_pattern, path.name) and path.is_dir():
                with suppress(OSError):  # another process removes it
                    yield path.lstat().st_mtime, _size(path), path


@dataclass(frozen=True, slots=True)
class Keep:
    """Keeps the graphs of a checkpoint that was just read.

    Attributes:
        entry: where to keep them.
        files: signatures of the files that were read, see
            `model.checkpoint.local_files.recording`.
        backbone, head: the checkpoint's, see `model.checkpoint.checkpoint`.
    """

    entry: KeptEntry
    files: Mapping[Path, Signature]
    backbone: str = ""
    head: Head | None = None

    def __call__(self, graph: T, checkpoint: Checkpoint, parameters: int, dtype: str) -> T:
        """Write a graph and return it as read from disk, so that all starts compile the same graph.

        OpenVINO fuses operations of a graph from disk differently than of one that was just
        translated. If the graph is not kept, the log says why, and it is returned as it is.

        Args:
            graph: None keeps only the head, if this process has the backbone already.
            checkpoint: the model.
            parameters: number of its parameters.
            dtype: the dtype in which the graph agrees with torch.
        """
        commit = self._unnamed_commit()
        if commit is not None:
            logger.info(
                "the graph is not kept: the hub may name another commit than %s next time", commit
            )
            return graph
        try:
            facts = self._facts(checkpoint, parameters, dtype)
            return cast(T, self.entry.put(graph, facts, self.head))
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning(
                "the graph is not kept (VIT_CACHE_DIR names the folder), and is made again: %s",
                first_line(error),
            )
            return graph

    def _unnamed_commit(self) -> str | None:
        """Return the commit of a hub file if no setting names it; a later start asks the hub."""
        for path in self.files:
            match = re.search(r"models--[^/]+/snapshots/([0-9a-f]{40})/", str(path))
            if match and match[1] not in self.entry.facts:
                return match[1]
        return None

    def _facts(self, checkpoint: Checkpoint, parameters: int, dtype: str) -> dict[str, Any]:
        """Return the fields of `Manifest` for `KeptEntry.put`.

        Raises:
            OSError: a file changed since it was read.
        """
        # Tracing the graph has loaded torch, which these modules import.
        from model.checkpoint.local_files import signature  # noqa: PLC0415
        from model.network.library import largest_layer  # noqa: PLC0415

        times = {str(path): file_times(path) for path in self.files}
        digests = {str(path): digest(path) for path in self.files}
        for path, before in self.files.items():
            if signature(path) != before:
                raise OSError(f"{path} changed since it was read")
        return {
            "files": digests,
            "times": {path: known for path, known in times.items() if known is not None},
            "backbone": self.backbone,
            "checkpoint": checkpoint,
            "parameters": parameters,
            "dtype": dtype,
            "largest_layer": largest_layer(checkpoint.config),
        }


def _warn_unusable(path: Path, error: Exception) -> None:
    logger.warning("%s: a graph that is not used and is made again: %s", path, first_line(error))


def _require_own(path: Path) -> None:
    """Raise ValueError if another user may have written the graph, because it will be run."""
    status = path.lstat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
        raise ValueError(f"it belongs to uid {status.st_uid}, or everybody may write into it")


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.iterdir())
