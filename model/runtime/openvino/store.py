"""Graphs that are kept on disk, so that a later start needs neither torch nor the checkpoint's tensors.

    FOLDER/KEY/manifest.json    the checksum of what follows, then what the graph was made of, and what it gives
              /graph.xml, .bin  the graph, in float32
              /reference.safetensors  torch's outputs, which each later start compares its own with

The key is a hash of every setting, version and fact of the machine that the graph depends on; what it is run with,
such as the number of threads, is no part of it. The manifest names every
file that was read for the checkpoint, with its hash: where one differs now, the graph is made again. An entry is
written beside its place and renamed, and never changed then, so that whoever reads it, or has it mapped into memory,
reads all of it; of several processes that write the same entry the last one stays.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import logging
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.numpy import load_file, save_file

from model.calibration import CALIBRATION_FILE, Calibration
from model.config import LibraryConfig, PreprocessConfig, ViTConfig
from model.errors import first_line, first_problem
from model.runtime.batches import BatchOutputs, BatchRequest
from model.runtime.openvino.graph import core, openvino_package
from model.runtime.openvino.network import NetworkGraph
from model.zero_shot import ZeroShot

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.checkpoint.local_files import Signature

logger = logging.getLogger(__name__)

LIMIT: Final = 4 << 30
"""Bytes of all entries together; those whose last use is longest ago go first."""

_MAX_MANIFEST: Final = 10 << 20
_MANIFEST: Final = "manifest.json"
_GRAPH: Final = "graph.xml"
_WEIGHTS: Final = "graph.bin"
_REFERENCE: Final = "reference.safetensors"
_FILES: Final = (_GRAPH, _WEIGHTS, _REFERENCE)
_ABANDONED: Final = 900.0
"""Seconds after which an entry that is still being written was given up by a process that ended."""

_VERSIONS: Final = ("vitserve", "openvino", "torch", "timm", "transformers", "numpy", "safetensors")
_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")


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
    embed_texts: Callable[[Sequence[str]], NDArray[np.float32]] | None = Field(None, exclude=True)


class Manifest(BaseModel):
    """What stands beside a graph.

    Attributes:
        key: what `Entry.key` hashes.
        files: the hash of each file that was read, of the names in each folder; None where there was nothing.
        graph: hashes of the graph's files.
        outputs, layers, relevance, all_tokens: see `NetworkGraph`.
        dtype: that it was found to agree with torch in.
        largest_layer: see `model.network.library.largest_layer`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    files: dict[str, str | None]
    graph: dict[str, str]
    outputs: tuple[str, ...] = Field(min_length=1)
    layers: tuple[int, ...]
    relevance: bool
    all_tokens: bool
    checkpoint: KeptCheckpoint
    parameters: int
    dtype: str
    largest_layer: int

    @property
    def request(self) -> BatchRequest:
        """Return what the graph gives."""
        return BatchRequest(layers=self.layers, relevance=self.relevance, all_tokens=self.all_tokens)


class _Damaged(ValueError):
    """An entry that is not what this process, or another of its user and version, wrote."""


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

    def key(self, extras: BatchRequest) -> str:
        """Return the name of the folder that holds the graph which gives these extras."""
        return hashlib.sha256(f"{self._facts}{extras.relevance}{extras.all_tokens}".encode()).hexdigest()[:40]

    def load(self, extras: BatchRequest = BatchRequest()) -> tuple[Manifest, NetworkGraph] | None:  # noqa: B008
        """Return a graph that was kept, or None where there is none that may be used; one line of the log says why."""
        place = self._folder / self.key(extras)
        try:
            self._require_own(self._folder)
            self._require_own(place)
            manifest = self._manifest(place, extras)
            for name, digest in manifest.graph.items():
                if _digest(place / name) != digest:
                    raise _Damaged(f"{name} is not the file that was written")
            if changed := changed_file(manifest):
                logger.info("%s is not as it was: the graph is made again", changed)
                return None
            reference = BatchOutputs.of(load_file(place / _REFERENCE))
            graph = NetworkGraph(_read(place, manifest), manifest.outputs, manifest.request, reference)
            with suppress(OSError):  # a folder that may only be read
                os.utime(place)
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not place.exists():
                return None
            reason = first_problem(error) if isinstance(error, ValidationError) else first_line(error)
            logger.warning("%s: a graph that is not used and is made again: %s", place, reason)
            return None
        return manifest, graph

    def _require_own(self, place: Path) -> None:
        """Raise where another user may have written what is to be run."""
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise _Damaged("it is no folder")
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
            raise _Damaged(f"it belongs to uid {status.st_uid}, or anybody may write into it")

    def _manifest(self, place: Path, extras: BatchRequest) -> Manifest:
        with _opened(place / _MANIFEST) as file:
            checksum, _, body = file.read(_MAX_MANIFEST).partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            raise _Damaged(f"{_MANIFEST} is not what was written")
        manifest = Manifest.model_validate_json(body)
        if manifest.key != self._facts:
            raise _Damaged("it is of other versions or settings")
        known = set(manifest.graph) == set(_FILES) and set(manifest.outputs) <= set(BatchOutputs._fields)
        if not known or manifest.request.extras != extras:
            raise _Damaged(f"{_MANIFEST} is of another graph")
        return manifest

    def stage(self, graph: NetworkGraph) -> tuple[Path, NetworkGraph]:
        """Write a graph to a folder of its own, and return that and the graph as it is read from there.

        Raises:
            OSError, RuntimeError, ValueError: it cannot be written, or the folder is another user's.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_own(self._folder)
        self._remove_abandoned()
        written = Path(tempfile.mkdtemp(prefix=".", dir=self._folder))
        try:
            openvino_package().save_model(graph.model, written / _GRAPH, compress_to_fp16=False)
            save_file(graph.reference.tensors() if graph.reference else {}, written / _REFERENCE)
            return written, graph._replace(model=core().read_model(written / _GRAPH))
        except BaseException as error:
            free = shutil.disk_usage(self._folder).free >> 20
            shutil.rmtree(written, ignore_errors=True)
            if isinstance(error, RuntimeError):  # of OpenVINO, whose message names neither the file nor the reason
                raise OSError(f"{self._folder} has {free} MiB left: {first_line(error)}") from error
            raise

    def save(self, written: Path, request: BatchRequest, facts: Mapping[str, Any]) -> None:
        """Put a graph that was staged in its place, from where it is loaded.

        Args:
            written: the folder that `stage` returned.
            request: what the graph gives.
            facts: the other fields of `Manifest`.

        Raises:
            OSError, ValueError: it cannot be written.
        """
        graph = {name: _digest(written / name) for name in _FILES}
        given: dict[str, Any] = {
            **{"layers": request.layers, "relevance": request.relevance, "all_tokens": request.all_tokens},
            **facts,
        }
        body = Manifest(key=self._facts, graph=graph, **given).model_dump_json().encode()
        manifest = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        if len(manifest) > _MAX_MANIFEST:  # it would be refused at each start, and made again
            raise ValueError(f"{_MANIFEST} would have {len(manifest)} bytes, at most {_MAX_MANIFEST} are read")
        (written / _MANIFEST).write_bytes(manifest)
        if self._make_room(_size(written)):
            self._put(written, self._folder / self.key(request.extras))

    def unpinned(self, files: Iterable[Path]) -> str | None:
        """Return a commit of the hub that files are of and no setting names: the next start asks the hub again."""
        commits = (re.search(r"models--[^/]+/snapshots/([0-9a-f]{40})/", str(path)) for path in files)
        return next((found[1] for found in commits if found and found[1] not in self._facts), None)

    def _put(self, written: Path, place: Path) -> None:
        """Rename an entry to its place; whoever has the one that was there mapped into memory keeps it."""
        for _ in range(10):
            try:
                written.rename(place)
            except OSError:  # there is one already
                with suppress(OSError):
                    place.rename(written.with_name(f"{written.name}.old"))
                _remove(written.with_name(f"{written.name}.old"))
            else:
                return
        raise OSError(f"{place} cannot be replaced")

    def _make_room(self, size: int) -> bool:
        """Remove what was not used for longest until a new entry has room; return whether it has."""
        if size > self._limit or size > shutil.disk_usage(self._folder).free // 2:
            logger.warning("%s: the graph is not kept: %d MiB are too much for it", self._folder, size >> 20)
            return False
        entries = sorted(self._entries("[0-9a-f]{40}"))
        total = sum(each for _, each, _ in entries)
        for _, each, place in entries:
            if total + size <= self._limit:
                break
            _remove(place)
            total -= each
        return True

    def _remove_abandoned(self) -> None:
        for used, _, place in self._entries(r"\..*"):
            if used < time.time() - _ABANDONED:
                _remove(place)

    def _entries(self, names: str) -> Iterable[tuple[float, int, Path]]:
        """Return the time of the last use, the bytes and the folder of each entry whose name is like that."""
        for place in self._folder.iterdir():
            if re.fullmatch(names, place.name):
                with suppress(OSError):
                    size = _size(place) if place.is_dir() and not place.is_symlink() else 0
                    yield place.lstat().st_mtime, size, place


class Keep:
    """Keeps the graphs of a checkpoint that was just read; where that fails, one line of the log says why.

    Args:
        entry: where.
        files: what was looked at when it was read, see `model.checkpoint.local_files.recording`.
    """

    def __init__(self, entry: Entry, files: Mapping[Path, Signature]) -> None:
        self._entry, self._files = entry, files
        self._staged: dict[BatchRequest, tuple[Path, NetworkGraph]] = {}

    def stage(self, graph: NetworkGraph) -> NetworkGraph:
        """Write a graph, and return it as it is read from there: what is compiled now and later is the same.

        OpenVINO fuses operations of a graph that was read in another way than of one that was just translated.
        """
        try:
            self._staged[graph.request.extras] = self._entry.stage(graph)
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning("the graph is not kept, and is made again at each start: %s", error)
            return graph
        return self._staged[graph.request.extras][1]

    def save(self, extras: BatchRequest, checkpoint: Checkpoint, parameters: int, dtype: str) -> None:
        """Keep a graph that was staged and found to agree with torch, unless a file was changed since it was read."""
        from model.checkpoint.local_files import signature  # noqa: PLC0415  torch made the graph, and is loaded
        from model.network.library import largest_layer  # noqa: PLC0415

        if extras not in self._staged:
            return
        written, graph = self._staged.pop(extras)
        try:
            if unpinned := self._entry.unpinned(self._files):
                logger.info("the graph is not kept: the hub may name another commit than %s next time", unpinned)
                return
            files = {str(path): digest_of(path) for path in self._files}
            for path, before in self._files.items():
                if signature(path) != before:
                    raise OSError(f"{path} changed since it was read")
            fields = KeptCheckpoint.model_fields.keys() - {"embed_texts"}
            kept = KeptCheckpoint.model_validate({name: getattr(checkpoint, name) for name in fields})
            facts = {"files": files, "checkpoint": kept, "outputs": graph.outputs, "parameters": parameters}
            facts |= {"dtype": dtype, "largest_layer": largest_layer(checkpoint.config)}
            self._entry.save(written, graph.request, facts)
        except (OSError, ValueError) as error:
            logger.warning("the graph is not kept, and is made again at each start: %s", error)
        finally:
            shutil.rmtree(written, ignore_errors=True)


def digest_of(path: Path) -> str | None:
    """Return a hash of a file's bytes, or of the names in a folder but a calibration's; None where there is neither."""
    try:
        if path.is_dir():
            names = (os.fsencode(each.name) for each in path.iterdir() if not each.name.startswith(CALIBRATION_FILE))
            return hashlib.sha256(b"\0".join(sorted(names))).hexdigest()
        return _digest(path) if path.is_file() else None
    except OSError:
        return None


def same_files(one: Manifest, other: Manifest) -> bool:
    """Return whether two graphs were made of the same files, whatever calibration is beside them."""

    def files(manifest: Manifest) -> dict[str, str | None]:
        return {path: digest for path, digest in manifest.files.items() if Path(path).name != CALIBRATION_FILE}

    return files(one) == files(other)


def changed_file(manifest: Manifest, *, but: str = "") -> str | None:
    """Return the path of a file, of another name than `but`, that no longer has the content as it was, or None."""
    files = {Path(path): content for path, content in manifest.files.items()}
    return next((str(path) for path in files if path.name != but and digest_of(path) != files[path]), None)


def _digest(path: Path) -> str:
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _opened(path: Path) -> io.BufferedReader:
    """Return a regular file, open for reading; what is none, such as a pipe, is not waited for."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _Damaged(f"{path.name} is no regular file")
    return file


def _remove(place: Path) -> None:
    """Remove a folder, or a link or file in the place of one."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with suppress(OSError):
            place.unlink()


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.iterdir())


def _read(place: Path, manifest: Manifest) -> Any:
    """Return the graph of an entry; its weights are mapped, and not copied."""
    model = core().read_model(place / _GRAPH)
    config = manifest.checkpoint.config
    taken = [str(part) for each in model.inputs for part in each.partial_shape]
    expected = ["?", *map(str, config.image_size), str(config.in_channels)]
    if taken != expected or len(model.outputs) != len(manifest.outputs):
        raise _Damaged(f"{_GRAPH} takes {taken}, and not {expected}, or has other outputs")
    return model


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@cache
def _code() -> str:
    """Return a hash of this package's code: in a clone it changes without the version."""
    folder, code = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        code.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return code.hexdigest()


def _machine() -> dict[str, object]:
    """Return what the graph's numbers, and torch's number of threads, depend on."""
    lines: list[str] = []
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        lines = [line for line in text.split("\n\n")[0].splitlines() if re.match(r"flags|Features|model|vendor", line)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    return {"cpu": hashlib.sha256("\n".join(lines).encode()).hexdigest(), "cores": cores, **variables}
