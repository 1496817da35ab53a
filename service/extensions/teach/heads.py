"""The taught heads of a web process, which reads them after changes and starts their fits.

    change --> commit --> every process sees it --> one process starts the fit --> commit -->
    every process sees it

Processes share only the file of examples, so workers and replicas with one folder have the same
heads. A child process fits. It holds a lock, so that only one fits at a time. If it ends early, the
next look starts a new one.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from model.errors import CheckpointError
from model.extensions.taught.taught_heads import Features, TaughtHead
from model.head_files import is_taught_head
from model.outputs import embedding_width
from service.background import Tasks
from service.children import start_python_async
from service.engine.messages import ModelInfo
from service.errors import EngineUnavailable, InvalidParameter, ModelFailed
from service.extensions.teach.database import kept_on_disk
from service.extensions.teach.errors import (
    HeadsUnavailable,
    HeadWithoutBackbone,
    HeadWithoutExamples,
)
from service.extensions.teach.examples import TOO_FEW, Examples, HeadRow
from service.models.all_models import Models
from service.models.folder import check_name
from service.models.served_heads import ServedHead
from service.observe import logs

logger = logging.getLogger("vitserve")

_LOOK_SECONDS: Final = 0.25
# Pause after a failed fit, unless examples change.
_PAUSE_SECONDS: Final = 30.0
_FIT_FAILED: Final = (
    f"its fit failed, and is tried again every {_PAUSE_SECONDS:g} s; the log says why"
)
_LOCK: Final = "fit.lock"
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Taught(NamedTuple):
    """A stored head, and its fit.

    Attributes:
        fitted: None before the first fit, and if the fit cannot be read.
        problem: why the fit cannot be read, or an empty text.
    """

    row: HeadRow
    fitted: TaughtHead | None
    problem: str = ""


def features_of(info: ModelInfo, features: Features) -> str:
    """Return the name of a model's features.

    The name identifies the backbone, the preprocessing and the embedding. It does not depend on the
    dtype, which only rounds the features.
    """
    digest = hashlib.sha256(info.preprocess.model_dump_json().encode()).hexdigest()
    return f"{info.backbone.partition('-')[0]}-{digest[:8]}{features.suffix}"


def _signature(path: Path) -> tuple[int, ...]:
    """Return numbers that change with a file's content; none for a missing file."""
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
    return ()


def _of_file(path: Path) -> Taught | None:
    """Return the head in a file, or why it is `failed`.

    None means a file without a head, or with an invalid name, which is logged.
    """
    row = HeadRow(0, path.stem, "", "", "", 0, 0, "")
    try:
        if not is_taught_head(path):
            return None
        check_name(path.stem)
        fitted = TaughtHead.from_file(path)
    except (InvalidParameter, OSError) as error:
        logger.error("no model: %s: %s", path, error)
        return None
    except CheckpointError as error:
        logger.error("model %s: %s", path.stem, error)
        return Taught(row, None, str(error))
    except Exception as error:  # a bad file fails only its own head
        logger.exception("model %s", path.stem)
        return Taught(row, None, f"{path.name}: cannot be read: {type(error).__name__}")
    return Taught(row._replace(backbone=fitted.backbone, model=fitted.model), fitted)


def _loaded(row: HeadRow, content: bytes | None) -> Taught:
    """Return a stored head with its fit, if there is one."""
    try:
        return Taught(row, None if content is None else TaughtHead.from_bytes(content, row.name))
    except CheckpointError as error:
        logger.error("%s", error)
        return Taught(row, None, f"{error}: add or remove an example to fit it again")


def _problem_of_width(taught: TaughtHead, info: ModelInfo | None) -> str:
    """Return why a head cannot read a model's features, or an empty text."""
    assert taught.head.weight is not None, "a taught head has weights"
    width = taught.head.weight.shape[1]
    if info is None:
        return ""
    width_of_model = embedding_width(info.config, taught.head.features)
    if width == width_of_model:
        return ""
    return f"it reads {width} features, and its backbone gives {width_of_model}"


class TaughtHeads:
    """The heads by name as of the last look, added to the models of the process.

    Args:
        examples: examples of the heads; None without VIT_TEACH.
        folder: folder of models, which may also have files of heads.
        models: models of the process.

    Attributes:
        has_looked: set after the first look of `watch`, whatever its result.
        child: process that fits the heads, until its end is known here.
    """

    def __init__(self, examples: Examples | None, folder: Path | None, models: Models) -> None:
        self.examples = examples
        self.heads: Mapping[str, Taught] = {}
        self._folder = folder
        self._models = models
        self._seen: object = None
        self._files: dict[Path, tuple[tuple[int, ...], Taught | None]] = {}
        self._overridden: set[str] = set()
        self._hidden: set[str] = set()
        self._look = asyncio.Event()
        self.has_looked = asyncio.Event()
        self._turn = asyncio.Lock()
        self._tasks = Tasks()
        self._next_look: asyncio.Task[None] | None = None
        self.child: Process | None = None
        # Heads that the last failed fit left, without the numbers of their fits, and its end.
        self._failed: tuple[Sequence[tuple[object, ...]], float] = ([], 0.0)

    def base(self, head: HeadRow) -> str:
        """Return the key of a model with the head's backbone.

        If there are several, the head's first model is preferred.

        Raises:
            HeadWithoutBackbone: no loaded model has it.
        """
        return self._base(head, self._features())

    def _features(self) -> dict[str, frozenset[str]]:
        """Return the names of the features that each loaded model gives, by its key."""
        served = self._models.served.items()
        infos = {key: model.info for key, model in served if model.info is not None}
        kinds = {key: (Features(), Features.of(info.config)) for key, info in infos.items()}
        return {
            key: frozenset(features_of(info, kind) for kind in kinds[key])
            for key, info in infos.items()
        }

    def _base(self, head: HeadRow, features: Mapping[str, frozenset[str]]) -> str:
        keys = [key for key, names in features.items() if head.backbone in names]
        if not keys:
            raise HeadWithoutBackbone(
                f"no model is served with the backbone of {head.model}, as it was taught on"
            )
        return min(keys, key=lambda key: self._models.name_of(key) != head.model)

    def is_file(self, name: str) -> bool:
        """Return whether a head of this name comes from a file, so that it cannot be taught."""
        return name in self.heads and not self.heads[name].row.id

    def renew(self) -> None:
        """Add the heads to the current models, except for heads with the name of a model."""
        names = {self._models.name_of(key) for key in self._models.served}
        hidden = self.heads.keys() & names | self._overridden
        newly_hidden = hidden - self._hidden
        self._hidden = hidden
        for name in sorted(newly_hidden):
            logger.error(
                "head %s: another model, or a head of VIT_TEACH, has this name and answers instead",
                name,
            )
        features = self._features()
        shown = {name: taught for name, taught in self.heads.items() if name not in names}
        self._models.heads = {name: self._added(taught, features) for name, taught in shown.items()}

    def _added(self, taught: Taught, features: Mapping[str, frozenset[str]]) -> ServedHead:
        """Return a head for the models; the same object as before if nothing has changed."""
        added = self._answering(taught, features)
        before = self._models.heads.get(taught.row.name)
        return before if before == added else added

    def _answering(self, taught: Taught, features: Mapping[str, frozenset[str]]) -> ServedHead:
        row = taught.row
        fitted = taught.fitted
        added = ServedHead(
            row.name,
            None if fitted is None else fitted.head,
            key=None,
            reason=taught.problem or row.reason,
            refusal=ModelFailed if taught.problem else HeadWithoutBackbone,
            removal=f"DELETE /heads/{row.name} removes it",
        )
        try:
            key = self._base(row, features)
        except HeadWithoutBackbone as error:
            added.reason = added.reason or str(error)
            return added
        if fitted is None:
            added.key = key
            if taught.problem:
                return added
            added.refusal = HeadWithoutExamples
            if row[:6] in self._failed[0]:
                added.reason = _FIT_FAILED
                added.refusal = EngineUnavailable
            added.is_begun = added.reason == TOO_FEW
            return added
        added.reason = _problem_of_width(fitted, self._models.served[key].info)
        if not added.reason:
            added.key = key
        return added

    def changed(self) -> None:
        """Look at the heads at once, because this process has changed them."""
        self._look.set()

    async def watch(self) -> None:
        """Look at the heads again and again until the task is cancelled.

        Without a folder for heads, return at once.
        """
        problem = ""
        try:
            while self.examples or self._folder:
                try:
                    await self.look()
                    problem = ""
                except HeadsUnavailable as error:
                    if problem != str(error):  # logged once
                        problem = str(error)
                        logger.error("%s", error)
                self.has_looked.set()
                self._look.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._look.wait(), _LOOK_SECONDS)
        finally:
            self.has_looked.set()
            self._tasks.cancel()
            if self.child is not None:
                with suppress(ProcessLookupError):
                    self.child.kill()

    async def look(self) -> None:
        """Read changed heads, and start the fit of heads with changed examples.

        Waiting callers share the next look, which continues if they are cancelled.
        """
        if self._next_look is None:
            self._next_look = self._tasks.begin(self._look_in_turn())
        await asyncio.shield(self._next_look)

    async def _look_in_turn(self) -> None:
        async with self._turn:
            self._next_look = None
            heads = await asyncio.to_thread(self._read)
            if heads is not self.heads:
                self.heads = heads
                self.renew()
            rows = [taught.row for taught in heads.values()]
            stale = [row[:6] for row in rows if row.fitted_revision < row.revision]
            failed, ended = self._failed
            waits = stale == failed and time.monotonic() < ended + _PAUSE_SECONDS
            if self.examples is not None and stale and not waits and self.child is None:
                self.child = await self._start(self.examples.database.path.parent)
            elif self.child is not None and self.child.returncode is not None:
                if self.child.returncode:
                    logger.error(
                        "the fit of taught heads failed: trying again in %g s", _PAUSE_SECONDS
                    )
                    self._failed = (stale, time.monotonic())
                    self.renew()
                self.child = None

    @kept_on_disk()
    def _read(self) -> Mapping[str, Taught]:
        # The folder's time is not enough: a file may be written in place, or in several writes.
        paths = self._folder.iterdir() if self._folder else ()
        signatures = {
            path: _signature(path)
            for path in paths
            if path.suffix == ".safetensors" and path.name[0] != "."
        }
        seen = (self.examples and self.examples.database.version(), signatures)
        if seen == self._seen:
            return self.heads
        files = self._files
        self._files = {}
        for path, signature in signatures.items():
            is_same = path in files and files[path][0] == signature
            self._files[path] = files[path] if is_same else (signature, _of_file(path))
        heads = {
            taught.row.name: taught for _, taught in self._files.values() if taught is not None
        }
        examples = self.examples
        rows = examples.heads() if examples else {}
        self._overridden = rows.keys() & heads.keys()
        for row in rows.values():
            before = self.heads.get(row.name)
            if before is None or (before.row.id, before.row.fitted_revision) != (
                row.id,
                row.fitted_revision,
            ):
                before = _loaded(row, examples.state(row)[1] if examples else None)
            heads[row.name] = before._replace(row=row)
        self._seen = seen
        return heads

    async def _start(self, folder: Path) -> Process | None:
        """Start a process that fits; None if a process of the service fits already."""
        with kept_on_disk():
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            where = str(folder.absolute())
            return await start_python_async(
                "service.extensions.teach.fit",
                where,
                logs.format_in_use(),
                more=_ONE_THREAD,
                stdin=DEVNULL,
                stdout=DEVNULL,
                pass_fds=(lock,),
            )
        except BlockingIOError:
            return None
        finally:
            os.close(lock)
