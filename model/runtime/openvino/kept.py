"""Graphs that are kept on disk, so that a later start needs neither torch nor the checkpoint's
tensors.

    FOLDER/KEY/manifest.json    what the graph was made of, and what it gives
              /graph.xml, .bin  the graph, in float32
              /reference.safetensors  torch's outputs, which each later start compares its own with
              /head.safetensors the head's weights, for a process in which another model has the same backbone

An entry of a model that was loaded beside such a one has a head, and no graph.

The key is a hash of every setting, version and fact of the machine that the graph depends on; what
it is run with, such as the number of threads, is no part of it. The manifest names every file that
was read for the checkpoint, with its hash: where one differs now, the graph is made again. An entry
is written beside its place and renamed, and never changed then, so that whoever has it mapped into
memory keeps it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, cast

import numpy as np
from pydantic import BaseModel, ConfigDict
from safetensors.numpy import load_file, save_file

from model.calibration import CALIBRATION_FILE
from model.description import Description
from model.errors import first_line
from model.heads import Head
from model.runtime.backend import BatchOutputs, BatchRequest, GraphKind
from model.runtime.openvino.backend import NetworkGraph, core, openvino_package

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.checkpoint.local_files import Signature

logger = logging.getLogger(__name__)

T = TypeVar("T", bound="NetworkGraph | None")

# Bytes of all entries together; those whose last use is longest ago go first.
LIMIT: Final = 4 << 30

_MANIFEST: Final = "manifest.json"
_GRAPH: Final = "graph.xml"
_REFERENCE: Final = "reference.safetensors"
_HEAD: Final = "head.safetensors"

# Nanoseconds after a change from which on another one shows in the time of a file.
_SETTLED: Final = 10_000_000_000

_VERSIONS: Final = ("vitserve", "openvino", "torch", "timm", "transformers", "numpy", "safetensors")


class Manifest(BaseModel):
    """What stands beside a graph.

    Attributes:
        key: what `Entry` hashes.
        files: the hash of each file that was read, of the names in each folder; None where there
        was nothing.
        times: size and time of change of these files; where they are the same, and not of just now,
        nothing is hashed.
        backbone: see `model.checkpoint.checkpoint`.
        graph: hashes of the files beside this one.
        kind: what the graph computes; see `BatchRequest.of_graph`.
        outputs: see `NetworkGraph`.
        dtype: that it was found to agree with torch in.
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
        """Return the path of a file, of another name than `but`, that no longer has the content as
        it was, or None.
        """
        same = {path for path, times in self.times.items() if times == _times(path)}
        files = ((Path(path), digest) for path, digest in self.files.items() if path not in same)
        return next(
            (str(path) for path, digest in files if path.name != but and _digest(path) != digest),
            None,
        )


class Entry:
    """The graphs of one model with its settings, in a folder of entries.

    Args:
        folder: of all entries; made when something is kept.
        settings: those that an answer depends on, by name.
        limit: see `LIMIT`.

    Attributes:
        facts: what the key is a hash of, in JSON.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object], *, limit: int = LIMIT) -> None:
        self._folder, self._limit = folder, limit
        facts = {
            "settings": dict(settings),
            "versions": _versions(),
            "code": _code(),
            "machine": _machine(),
        }
        self.facts = json.dumps(facts, sort_keys=True, default=str)

    def place(self, kind: GraphKind = "plain") -> Path:
        """Return the folder of a graph."""
        return self._folder / hashlib.sha256(f"{self.facts}{kind}".encode()).hexdigest()[:40]

    def manifest(self, kind: GraphKind = "plain") -> Manifest | None:
        """Return what was kept, or None where there is nothing that may be used; one line of the
        log says why.
        """
        place = self.place(kind)
        if not place.exists():
            return None
        try:
            _require_own(self._folder)
            _require_own(place)
            manifest = Manifest.model_validate_json((place / _MANIFEST).read_bytes())
            digests = {name: _digest(place / name) for name in manifest.graph}
            if manifest.key != self.facts or digests != manifest.graph:
                raise ValueError("it is not what was written")
            if changed := manifest.changed_file():
                logger.info("%s is not as it was: the graph is made again", changed)
                return None
            with suppress(OSError):  # a folder that may only be read
                os.utime(place)
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning(
                "%s: a graph that is not used and is made again: %s", place, first_line(error)
            )
            return None
        return manifest

    def load(
        self, manifest: Manifest | None = None, kind: GraphKind = "plain"
    ) -> tuple[Manifest, NetworkGraph] | None:
        """Return a graph that was kept, or None as `manifest`, by which it was just looked at, or
        where only a head is.

        A head alone is as good as nothing where no process has its backbone.
        """
        found, place = manifest or self.manifest(kind), self.place(kind)
        if found is None or _GRAPH not in found.graph:
            return None
        try:
            request = BatchRequest.of_graph(found.kind, found.checkpoint.config)
            reference = BatchOutputs.of(load_file(place / _REFERENCE))
            model = core().read_model(place / _GRAPH)  # its weights are mapped, and not copied
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning(
                "%s: a graph that is not used and is made again: %s", place, first_line(error)
            )
            return None
        return found, NetworkGraph(model, found.outputs, request, reference)

    def head(self, manifest: Manifest) -> Head | None:
        """Return the head that was kept; None where the model has none of its own. Raises OSError
        or RuntimeError.
        """
        if _HEAD not in manifest.graph:
            return None
        arrays = load_file(self.place() / _HEAD)
        return replace(manifest.checkpoint.head, weight=arrays["weight"], bias=arrays["bias"])

    def put(
        self, graph: NetworkGraph | None, facts: Mapping[str, object], head: Head | None
    ) -> NetworkGraph | None:
        """Write a graph, and its head, to their place, and return the graph as it is read from
        there.

        Args:
            facts: the fields of `Manifest` that neither the graph nor this entry tells.
            head: the checkpoint's, if it has one of its own.

        Raises:
            OSError, RuntimeError, ValueError: it cannot be written, or the folder is another
            user's.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(self._folder)
        kind: GraphKind = "plain" if graph is None else graph.request.graph_kind
        place = self.place(kind)
        # A file that who writes an entry has locked: the kernel unlocks it when the process ends.
        with (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for _, _, abandoned in self._entries(r"\..*"):  # by a process that was killed
                shutil.rmtree(abandoned, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=self._folder) as name:
                written = Path(name) / place.name
                written.mkdir(mode=0o700)
                of_graph: dict[str, object] = {}
                if graph is not None:
                    openvino_package().save_model(
                        graph.model, written / _GRAPH, compress_to_fp16=False
                    )
                    save_file(graph.reference.tensors(), written / _REFERENCE)
                    of_graph = {"kind": kind, "outputs": graph.outputs}
                if head is not None and head.weight is not None:
                    save_file(
                        {"weight": head.weight, "bias": np.asarray(head.bias, np.float32)},
                        written / _HEAD,
                    )
                digests = {file.name: _digest(file) for file in written.iterdir()}
                manifest = Manifest.model_validate(
                    {"key": self.facts, "graph": digests, **of_graph, **facts}
                )
                (written / _MANIFEST).write_text(manifest.model_dump_json())
                self._make_room(_size(written))
                shutil.rmtree(place, ignore_errors=True)
                written.rename(place)
        return graph and graph._replace(model=core().read_model(place / _GRAPH))

    def remove(self, kind: GraphKind) -> None:
        """Remove a graph that is not what torch computes."""
        shutil.rmtree(self.place(kind), ignore_errors=True)

    def _make_room(self, size: int) -> None:
        """Remove the entries that are unused for longest until so many bytes fit; raises OSError
        where they do not.
        """
        if size > self._limit or size > shutil.disk_usage(self._folder).free // 2:
            raise OSError(f"{size >> 20} MiB are too much for {self._folder}")
        entries = sorted(self._entries("[0-9a-f]{40}"))
        total = size + sum(each for _, each, _ in entries)
        for _, each, place in entries:
            if total > self._limit:
                shutil.rmtree(place, ignore_errors=True)
                total -= each

    def _entries(self, names: str) -> Iterable[tuple[float, int, Path]]:
        """Return the time of the last use, the bytes and the folder of each entry whose name is
        like that.
        """
        for place in self._folder.iterdir():
            if re.fullmatch(names, place.name) and place.is_dir():
                with suppress(OSError):  # another process removes it
                    yield place.lstat().st_mtime, _size(place), place


@dataclass(frozen=True, slots=True)
class Keep:
    """Keeps the graphs of a checkpoint that was just read.

    Attributes:
        entry: where.
        files: what was looked at when it was read, see `model.checkpoint.local_files.recording`.
        backbone, head: of the checkpoint, see `model.checkpoint.checkpoint`.
    """

    entry: Entry
    files: Mapping[Path, Signature]
    backbone: str = ""
    head: Head | None = None

    def __call__(self, graph: T, checkpoint: Checkpoint, parameters: int, dtype: str) -> T:
        """Write a graph, and return it as it is read from there: what is compiled now and later is
        the same.

        None is the graph of a backbone that this process has already: the head is kept alone.

        OpenVINO fuses operations of a graph that was read in another way than of one that was just
        translated. Where it is not kept, or a file was changed since it was read, one line of the
        log says why, and the graph is returned.
        """
        from model.checkpoint.local_files import signature  # noqa: PLC0415  torch made the graph, and is loaded
        from model.network.library import largest_layer  # noqa: PLC0415

        commits = (
            re.search(r"models--[^/]+/snapshots/([0-9a-f]{40})/", str(path)) for path in self.files
        )
        for commit in (found[1] for found in commits if found):
            if (
                commit not in self.entry.facts
            ):  # no setting names it: the next start asks the hub again
                logger.info(
                    "the graph is not kept: the hub may name another commit than %s next time",
                    commit,
                )
                return graph
        try:
            times, files = (
                {str(path): read(path) for path in self.files} for read in (_times, _digest)
            )
            if changed := [
                path for path, before in self.files.items() if signature(path) != before
            ]:
                raise OSError(f"{changed[0]} changed since it was read")
            facts = {
                "files": files,
                "checkpoint": checkpoint,
                "parameters": parameters,
                "dtype": dtype,
            }
            facts |= {"times": {path: each for path, each in times.items() if each is not None}}
            facts |= {"largest_layer": largest_layer(checkpoint.config), "backbone": self.backbone}
            return cast(T, self.entry.put(graph, facts, self.head))
        except (OSError, RuntimeError, ValueError) as error:
            reason = first_line(error)
            logger.warning(
                "the graph is not kept (VIT_CACHE_DIR names the folder), and is made again: %s",
                reason,
            )
            return graph


def _require_own(place: Path) -> None:
    """Raise where another user may have written what is to be run."""
    status = place.lstat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
        raise ValueError(f"it belongs to uid {status.st_uid}, or anybody may write into it")


def _times(path: str | Path) -> tuple[int, int] | None:
    """Return the size and the time of change of a file, None of a folder, of nothing, and of what
    changed just now.
    """
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    is_settled = time.time_ns() - status.st_mtime_ns > _SETTLED
    return (
        (status.st_size, status.st_mtime_ns)
        if is_settled and stat.S_ISREG(status.st_mode)
        else None
    )


def _digest(path: Path) -> str | None:
    """Return a hash of a file's bytes, or of the names in a folder but a calibration's; None where
    there is neither.
    """
    try:
        if path.is_dir():
            names = (
                os.fsencode(each.name)
                for each in path.iterdir()
                if not each.name.startswith(CALIBRATION_FILE)
            )
            return hashlib.sha256(b"\0".join(sorted(names))).hexdigest()
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.iterdir())


@functools.cache  # to read them takes 10 ms, which each model would
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def _code() -> str:
    """Return a hash of this package's code: in a clone it changes without the version."""
    folder, code = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        code.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return code.hexdigest()


def _machine() -> dict[str, object]:
    """Return what the graph's numbers depend on."""
    lines: list[str] = []
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        lines = [
            line
            for line in text.split("\n\n")[0].splitlines()
            if re.match(r"flags|Features|model|vendor", line)
        ]
    return {"cpu": "\n".join(lines), "isa": os.environ.get("ONEDNN_MAX_CPU_ISA")}
