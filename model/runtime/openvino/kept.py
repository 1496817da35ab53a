"""Graphs that are kept on disk, so that a later start needs neither torch nor the checkpoint's tensors.

    FOLDER/KEY/manifest.json    what the graph was made of, and what it gives
              /graph.xml, .bin  the graph, in float32
              /reference.safetensors  torch's outputs, which each later start compares its own with

The key is a hash of every setting, version and fact of the machine that the graph depends on; what it is run with,
such as the number of threads, is no part of it. The manifest names every file that was read for the checkpoint, with
its hash: where one differs now, the graph is made again. An entry is written beside its place and renamed, and never
changed then, so that whoever has it mapped into memory keeps it.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import load_file, save_file

from model.calibration import CALIBRATION_FILE, Calibration
from model.config import LibraryConfig, PreprocessConfig, ViTConfig
from model.errors import first_line
from model.heads import Floats, ZeroShot
from model.runtime.batches import BatchOutputs, BatchRequest
from model.runtime.openvino.graph import core, openvino_package
from model.runtime.openvino.network import NetworkGraph

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.checkpoint.local_files import Signature

logger = logging.getLogger(__name__)

LIMIT: Final = 4 << 30
"""Bytes of all entries together; those whose last use is longest ago go first."""

_MANIFEST: Final = "manifest.json"
_GRAPH: Final = "graph.xml"
_REFERENCE: Final = "reference.safetensors"
_FILES: Final = (_GRAPH, "graph.bin", _REFERENCE)
_LOCK: Final = "lock"
"""A file in a folder that is being written, locked until that is done: the kernel unlocks it when the process ends."""

_NOT_KEPT: Final = "the graph is not kept, and is made again at each start (VIT_CACHE_DIR names the folder): %s"
_VERSIONS: Final = ("vitserve", "openvino", "torch", "timm", "transformers", "numpy", "safetensors")


class KeptCheckpoint(BaseModel):
    """All of a `Checkpoint` that serving its graph needs; its attributes are those of the same names there."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    source: str
    format: str
    architecture: str
    config: ViTConfig | LibraryConfig
    preprocess: PreprocessConfig
    labels: tuple[str, ...]
    temperature: float
    multi_label: bool
    revision: str | None
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    zero_shot: ZeroShot | None
    calibration: Calibration | None
    content: str
    embed_texts: Callable[[Sequence[str]], Floats] | None = Field(None, exclude=True)


class Manifest(BaseModel):
    """What stands beside a graph.

    Attributes:
        key: what `Entry` hashes.
        files: the hash of each file that was read, of the names in each folder; None where there was nothing.
        graph: hashes of the graph's files.
        outputs, layers, relevance: see `NetworkGraph`.
        dtype: that it was found to agree with torch in.
        largest_layer: see `model.network.library.largest_layer`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    files: dict[str, str | None]
    graph: dict[str, str]
    outputs: tuple[str, ...]
    layers: tuple[int, ...]
    relevance: bool
    checkpoint: KeptCheckpoint
    parameters: int
    dtype: str
    largest_layer: int

    def changed_file(self, *, but: str = "") -> str | None:
        """Return the path of a file, of another name than `but`, that no longer has the content as it was, or None."""
        files = ((Path(path), digest) for path, digest in self.files.items())
        return next((str(path) for path, digest in files if path.name != but and _digest(path) != digest), None)


class Staged(NamedTuple):
    """A graph that was written, as it is read again, and the lock of its folder."""

    folder: Path
    graph: NetworkGraph
    lock: IO[str]


class Entry:
    """The graphs of one model with its settings, in a folder of entries.

    Args:
        folder: of all entries; made when something is kept.
        settings: those that an answer depends on, by name.
        limit: see `LIMIT`.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object], *, limit: int = LIMIT) -> None:
        self._folder, self._limit = folder, limit
        facts = {"settings": dict(settings), "versions": _versions(), "code": _code(), "machine": _machine()}
        self._facts = json.dumps(facts, sort_keys=True, default=str)

    def place(self, *, relevance: bool) -> Path:
        """Return the folder of the graph that gives relevance, or does not."""
        return self._folder / hashlib.sha256(f"{self._facts}{relevance}".encode()).hexdigest()[:40]

    def load(self, *, relevance: bool = False) -> tuple[Manifest, NetworkGraph] | None:
        """Return a graph that was kept, or None where there is none that may be used; one line of the log says why."""
        place = self.place(relevance=relevance)
        self._remove_abandoned()
        if not place.exists():
            return None
        try:
            _require_own(self._folder)
            _require_own(place)
            manifest = Manifest.model_validate_json((place / _MANIFEST).read_bytes())
            if manifest.key != self._facts or {name: _digest(place / name) for name in _FILES} != manifest.graph:
                raise ValueError("it is not what was written")
            if changed := manifest.changed_file():
                logger.info("%s is not as it was: the graph is made again", changed)
                return None
            request = BatchRequest(layers=manifest.layers, relevance=manifest.relevance)
            reference = BatchOutputs.of(load_file(place / _REFERENCE))
            model = core().read_model(place / _GRAPH)  # its weights are mapped, and not copied
            with suppress(OSError):  # a folder that may only be read
                os.utime(place)
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning("%s: a graph that is not used and is made again: %s", place, first_line(error))
            return None
        return manifest, NetworkGraph(model, manifest.outputs, request, reference)

    def stage(self, graph: NetworkGraph) -> Staged:
        """Write a graph to a folder of its own, which is locked until the result's lock is closed.

        Raises:
            OSError, RuntimeError: it cannot be written, or the folder is another user's.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(self._folder)
        with _lock(self._folder):  # else it may be removed before it is locked
            written = Path(tempfile.mkdtemp(prefix=".", dir=self._folder))
            lock = _lock(written)
        try:
            openvino_package().save_model(graph.model, written / _GRAPH, compress_to_fp16=False)
            save_file(graph.reference.tensors(), written / _REFERENCE)
            return Staged(written, graph._replace(model=core().read_model(written / _GRAPH)), lock)
        except BaseException:
            lock.close()
            shutil.rmtree(written, ignore_errors=True)
            raise

    def put(self, written: Path, facts: Mapping[str, Any], *, relevance: bool) -> None:
        """Put a graph that was staged in its place, from where it is loaded.

        Args:
            written: the folder of what `stage` returned.
            facts: the other fields of `Manifest`.

        Raises:
            OSError, ValueError: it cannot be written.
        """
        graph = {name: _digest(written / name) for name in _FILES}
        manifest = Manifest.model_validate({"key": self._facts, "graph": graph, "relevance": relevance, **facts})
        (written / _MANIFEST).write_text(manifest.model_dump_json())
        size = _size(written)
        if size > self._limit or size > shutil.disk_usage(self._folder).free // 2:
            raise OSError(f"{size >> 20} MiB are too much for {self._folder}")
        entries = sorted(self._entries("[0-9a-f]{40}"))
        total = size + sum(each for _, each, _ in entries)
        for _, each, place in entries:
            if total > self._limit:
                shutil.rmtree(place, ignore_errors=True)
                total -= each
        place = self.place(relevance=relevance)
        shutil.rmtree(place, ignore_errors=True)
        written.rename(place)

    def unpinned(self, files: Iterable[Path]) -> str | None:
        """Return a commit of the hub that files are of and no setting names: the next start asks the hub again."""
        commits = (re.search(r"models--[^/]+/snapshots/([0-9a-f]{40})/", str(path)) for path in files)
        return next((found[1] for found in commits if found and found[1] not in self._facts), None)

    def _remove_abandoned(self) -> None:
        """Remove what processes were writing that have ended."""
        with suppress(OSError), _lock(self._folder):  # none is there, or it may only be read
            for _, _, place in self._entries(r"\..*"):
                with suppress(BlockingIOError), _lock(place, wait=False):
                    shutil.rmtree(place, ignore_errors=True)

    def _entries(self, names: str) -> Iterable[tuple[float, int, Path]]:
        """Return the time of the last use, the bytes and the folder of each entry whose name is like that."""
        for place in self._folder.iterdir():
            if re.fullmatch(names, place.name) and place.is_dir():
                with suppress(OSError):  # another process removes it
                    yield place.lstat().st_mtime, _size(place), place


class Keep:
    """Keeps the graphs of a checkpoint that was just read; where that fails, one line of the log says why.

    Args:
        entry: where.
        files: what was looked at when it was read, see `model.checkpoint.local_files.recording`.
    """

    def __init__(self, entry: Entry, files: Mapping[Path, Signature]) -> None:
        self._entry, self._files = entry, files
        self._staged: dict[bool, Staged] = {}

    def stage(self, graph: NetworkGraph) -> NetworkGraph:
        """Write a graph, and return it as it is read from there: what is compiled now and later is the same.

        OpenVINO fuses operations of a graph that was read in another way than of one that was just translated.
        """
        try:
            self._staged[graph.request.relevance] = self._entry.stage(graph)
        except (OSError, RuntimeError) as error:
            logger.warning(_NOT_KEPT, first_line(error))
            return graph
        return self._staged[graph.request.relevance].graph

    def save(self, relevance: bool, checkpoint: Checkpoint, parameters: int, dtype: str) -> None:
        """Keep a graph that was staged and found to agree with torch, unless a file was changed since it was read."""
        from model.checkpoint.local_files import signature  # noqa: PLC0415  torch made the graph, and is loaded
        from model.network.library import largest_layer  # noqa: PLC0415

        if relevance not in self._staged:
            return
        written, graph, lock = self._staged.pop(relevance)
        try:
            if unpinned := self._entry.unpinned(self._files):
                logger.info("the graph is not kept: the hub may name another commit than %s next time", unpinned)
                return
            files = {str(path): _digest(path) for path in self._files}
            if changed := [path for path, before in self._files.items() if signature(path) != before]:
                raise OSError(f"{changed[0]} changed since it was read")
            fields = KeptCheckpoint.model_fields.keys() - {"embed_texts"}
            kept = KeptCheckpoint.model_validate({name: getattr(checkpoint, name) for name in fields})
            facts = {"files": files, "checkpoint": kept, "outputs": graph.outputs, "layers": graph.request.layers}
            facts |= {"parameters": parameters, "dtype": dtype, "largest_layer": largest_layer(checkpoint.config)}
            self._entry.put(written, facts, relevance=relevance)
        except (OSError, ValueError) as error:
            logger.warning(_NOT_KEPT, first_line(error))
        finally:
            shutil.rmtree(written, ignore_errors=True)
            lock.close()


def _lock(folder: Path, *, wait: bool = True) -> IO[str]:
    """Return a file that locks a folder until it is closed; raises `BlockingIOError` where not to wait for another."""
    file = (folder / _LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _require_own(place: Path) -> None:
    """Raise where another user may have written what is to be run."""
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError("it is no folder")
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
        raise ValueError(f"it belongs to uid {status.st_uid}, or anybody may write into it")


def _digest(path: Path) -> str | None:
    """Return a hash of a file's bytes, or of the names in a folder but a calibration's; None where there is neither."""
    try:
        if path.is_dir():
            names = (os.fsencode(each.name) for each in path.iterdir() if not each.name.startswith(CALIBRATION_FILE))
            return hashlib.sha256(b"\0".join(sorted(names))).hexdigest()
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.iterdir())


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
        lines = [line for line in text.split("\n\n")[0].splitlines() if re.match(r"flags|Features|model|vendor", line)]
    return {"cpu": "\n".join(lines), "isa": os.environ.get("ONEDNN_MAX_CPU_ISA")}
