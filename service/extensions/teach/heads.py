"""The taught heads of a web process: read again when they change, and fitted by a child process
when they have to be.

    change --> commit --> seen by every process of the service --> one of them starts the fit -->
    commit --> seen by all

The file of examples is all that processes share, so workers and replicas with one folder have the
same heads. A lock that the child holds makes it the only one that fits; whatever ends, the next
look starts it again.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from model.errors import CheckpointError
from model.outputs import embedding_width
from model.taught_heads import Features, TaughtHead, is_taught_head
from service.background import Tasks
from service.children import start_python_async
from service.engine.messages import ModelInfo
from service.errors import HeadsUnavailable, HeadWithoutBackbone, InvalidParameter
from service.extensions.teach.database import kept_on_disk
from service.extensions.teach.examples import Examples, HeadRow
from service.models.added_heads import AddedHead
from service.models.folder import check_name
from service.models.registry import Models
from service.observe import logs

logger = logging.getLogger("vitserve")

_LOOK_SECONDS: Final = 0.25
# After a fit that failed, unless examples change before.
_PAUSE_SECONDS: Final = 30.0
_LOCK: Final = "fit.lock"
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Taught(NamedTuple):
    """A head as it is kept, and as it answers.

    Attributes:
        fitted: None before its first fit, and if it cannot be read.
        problem: why it cannot be read; empty if it can.
    """

    row: HeadRow
    fitted: TaughtHead | None
    problem: str = ""


def features_of(info: ModelInfo, features: Features) -> str:
    """Return what names the features that a model gives of a picture.

    That is its backbone, how pictures become pixels, and which embedding it is. The dtype is no
    part of it: it changes features by their rounding alone.
    """
    digest = hashlib.sha256(info.preprocess.model_dump_json().encode()).hexdigest()
    return f"{info.backbone.partition('-')[0]}-{digest[:8]}{features.suffix}"


def _signature(path: Path) -> tuple[int, ...]:
    """Return what changes with a file's content; nothing of one that is gone."""
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
    return ()


def _of_file(path: Path) -> Taught | None:
    """Return the head in a file, or why it is `failed`; None where it is none, of which the log
    tells.
    """
    row, fitted = HeadRow(0, path.stem, "", "", "", 0, 0, ""), None
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
    except Exception as error:  # whatever is wrong with a file costs its head alone
        logger.exception("model %s", path.stem)
        return Taught(row, None, f"{path.name}: cannot be read: {type(error).__name__}")
    return Taught(row._replace(backbone=fitted.backbone, model=fitted.model), fitted)


def _loaded(row: HeadRow, content: bytes | None) -> Taught:
    """Return a head as it was fitted, if it was."""
    try:
        return Taught(row, None if content is None else TaughtHead.from_bytes(content, row.name))
    except CheckpointError as error:
        logger.error("%s", error)
        return Taught(row, None, f"{error}: add or remove an example, and it is fitted again")


def _problem_of_width(taught: TaughtHead, info: ModelInfo | None) -> str:
    """Return why a model's features do not fit a head, or an empty text."""
    assert taught.head.weight is not None, "a taught head has weights"
    width = taught.head.weight.shape[1]
    if info is None:
        return ""
    given = embedding_width(info.config, taught.head.features)
    return "" if width == given else f"it reads {width} features, and its backbone gives {given}"


class TaughtHeads:
    """The heads by name, as of the last look at them; each is added to the models of the process.

    Args:
        examples: where they are kept; None: nothing is taught.
        folder: of models, where files of heads may lie, too.
        models: those of the process.

    Attributes:
        child: the process that fits for this one, until its end is known.
    """

    def __init__(self, examples: Examples | None, folder: Path | None, models: Models) -> None:
        self.examples = examples
        self.heads: Mapping[str, Taught] = {}
        self._folder, self._models = folder, models
        self._seen: object = None
        self._files: dict[Path, tuple[tuple[int, ...], Taught | None]] = {}
        self._beaten, self._hidden = set[str](), set[str]()
        self._look, self._turn = asyncio.Event(), asyncio.Lock()
        self._tasks = Tasks()
        self._next_look: asyncio.Task[None] | None = None
        self.child: Process | None = None
        self._failed: tuple[object, float] = None, 0.0

    def base(self, head: HeadRow) -> str:
        """Return the key of the model with a head's backbone, the one that it was begun with if
        there are several.

        Raises:
            HeadWithoutBackbone: no model that was loaded has it.
        """
        return self._base(head, self._features())

    def _features(self) -> dict[str, frozenset[str]]:
        """Return what names the features of each model that was loaded, by its key."""
        served = self._models.served.items()
        infos = {key: model.info for key, model in served if model.info is not None}
        kinds = {key: (Features(), Features.of(info.config)) for key, info in infos.items()}
        return {
            key: frozenset(features_of(info, kind) for kind in kinds[key])
            for key, info in infos.items()
        }

    def _base(self, head: HeadRow, features: Mapping[str, frozenset[str]]) -> str:
        found = [key for key, names in features.items() if head.backbone in names]
        if not found:
            raise HeadWithoutBackbone(
                f"no model is served with the backbone of {head.model}, as it was taught on"
            )
        return min(found, key=lambda key: self._models.name_of(key) != head.model)

    def is_file(self, name: str) -> bool:
        """Return whether a head of this name lies in the folder of models: it is taught nothing
        here.
        """
        return name in self.heads and not self.heads[name].row.id

    def renew(self) -> None:
        """Add the heads to the models, as both are now; the name of a model is no head's."""
        names = {self._models.name_of(key) for key in self._models.served}
        hidden, before = self.heads.keys() & names | self._beaten, self._hidden
        self._hidden = hidden
        for name in sorted(hidden - before):
            logger.error(
                "head %s: another model, or a head of VIT_TEACH, has this name and answers instead",
                name,
            )
        features = self._features()
        shown = {name: taught for name, taught in self.heads.items() if name not in names}
        self._models.added = {name: self._added(taught, features) for name, taught in shown.items()}

    def _added(self, taught: Taught, features: Mapping[str, frozenset[str]]) -> AddedHead:
        """Return how a head answers beside the models, or why it does not."""
        added, before = self._answering(taught, features), self._models.added.get(taught.row.name)
        return before if before == added else added

    def _answering(self, taught: Taught, features: Mapping[str, frozenset[str]]) -> AddedHead:
        row, fitted = taught.row, taught.fitted
        head = None if fitted is None else fitted.head
        try:
            key = self._base(row, features)
        except HeadWithoutBackbone as error:
            return AddedHead(row.name, head, None, taught.problem or row.reason or str(error))
        if fitted is None:
            return AddedHead(row.name, None, key, taught.problem or row.reason)
        problem = _problem_of_width(fitted, self._models.served[key].info)
        return AddedHead(row.name, head, None if problem else key, problem)

    def changed(self) -> None:
        """Look at the heads at once: this process has changed them."""
        self._look.set()

    async def watch(self) -> None:
        """Look at the heads again and again, until the task is cancelled; there may be none that
        ever come.
        """
        problem = ""
        try:
            while self.examples or self._folder:
                try:
                    await self.look()
                    problem = ""
                except HeadsUnavailable as error:
                    if problem != str(error):  # once, however often it is tried again
                        problem = str(error)
                        logger.error("%s", error)
                self._look.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._look.wait(), _LOOK_SECONDS)
        finally:
            self._tasks.cancel()
            if self.child is not None:
                with suppress(ProcessLookupError):
                    self.child.kill()

    async def look(self) -> None:
        """Read the heads if they have changed, and start the fit of those whose examples have.

        Callers that wait share the next look, which goes on if they leave.
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
                self.child = await self._start(self.examples.path.parent)
            elif self.child is not None and self.child.returncode is not None:
                if self.child.returncode:
                    logger.error(
                        "the fit of taught heads failed: it is tried again in %g s", _PAUSE_SECONDS
                    )
                    self._failed = stale, time.monotonic()
                self.child = None

    @kept_on_disk()
    def _read(self) -> Mapping[str, Taught]:
        # The folder's own time tells too little: a file may be written in place, or in several
        # writes.
        paths = self._folder.iterdir() if self._folder else ()
        found = {
            path: _signature(path)
            for path in paths
            if path.suffix == ".safetensors" and path.name[0] != "."
        }
        seen = self.examples and self.examples.version(), found
        if seen == self._seen:
            return self.heads
        files, self._files = self._files, {}
        for path, signature in found.items():
            is_same = path in files and files[path][0] == signature
            self._files[path] = files[path] if is_same else (signature, _of_file(path))
        heads = {
            taught.row.name: taught for _, taught in self._files.values() if taught is not None
        }
        examples = self.examples
        rows = examples.heads() if examples else {}
        self._beaten = rows.keys() & heads.keys()
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
        """Return the process that fits, or None where one of any process of the service is at it."""
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
