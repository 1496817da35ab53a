"""Builds the predictor that the settings name; no other file of the service loads a model, and
torch with it.

    graphs that were kept, else torch

Torch and what it reads stay resident for good: beside the bundled model's 210 MiB they are 300. So
a process that serves by OpenVINO and loads another checkpoint leaves that to a child (`python -m
service.engine.loading`), which makes the graphs with torch, and they are kept then.

A model whose backbone a predictor of this process has already is a further head of that predictor,
which is returned.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from model.errors import CheckpointError, VitError
from model.heads import Head
from model.outputs import embedding_width
from model.runtime.backend import WITHOUT_GRAPHS
from service.children import COMMON, LOADING, start_python
from service.engine.devices import VISIBLE, gpus_are_here, visible_devices
from service.engine.messages import ModelInfo, attributes
from service.extension import extensions
from service.model_settings import PATHS
from service.settings import Settings, load_settings

if TYPE_CHECKING:
    from model.calibration import LabelSets
    from model.checkpoint import Checkpoint
    from model.description import Description
    from model.features import Floats
    from model.runtime.openvino.kept import Entry, Keep
    from model.runtime.predictor import Predictor

logger = logging.getLogger(__name__)

# The settings that change a graph, or what it is compared with, or whether the checkpoint is read
# at all.
_MATTER: Final = (
    *(
        "checkpoint",
        "image_size",
        "preprocess",
        "labels",
        "activation",
        "architecture",
        "keys",
        "base",
    ),
    *("models", "checkpoint_folder", "dtype"),
)

# The folders of torch's compilers in the cache folder, by the variables that name them.
_KERNELS: Final = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
}

# The predictors of this process, by the keys of their backbones.
_LIVE: Final[WeakValueDictionary[str, Predictor]] = WeakValueDictionary()


def checkpoint_from(settings: Settings) -> Checkpoint:
    """Read the checkpoint that the settings name; raises `CheckpointError` if it cannot be read
    exactly.
    """
    from model.checkpoint import load_checkpoint  # noqa: PLC0415  torch takes seconds to import
    from model.checkpoint.options import SETTINGS  # noqa: PLC0415

    models = () if settings.models is None else (Path(settings.models).expanduser(),)
    named = () if settings.checkpoint_folder is None else (Path(settings.checkpoint_folder),)
    folders = (*models, *named)
    for name in PATHS:
        _require_inside(name, getattr(settings, name), folders)
    options = {name: getattr(settings, name) for name in SETTINGS}
    below = folders if _lies_below(settings.checkpoint, folders) else None
    return load_checkpoint(
        settings.checkpoint,
        bases_below=below,
        hub_bases=_lies_below(settings.checkpoint, models),
        **options,
    )


def _lies_below(source: str, folders: Iterable[Path]) -> bool:
    """Return whether a checkpoint lies below one of some folders, by its path or once all links are
    followed.
    """
    path = Path(source)
    with suppress(OSError, RuntimeError):
        return any(
            path.absolute().is_relative_to(folder.absolute())
            or path.resolve().is_relative_to(folder.resolve())
            for folder in folders
        )
    return True


def _require_inside(name: str, value: str | None, folders: Sequence[Path]) -> None:
    """Refuse a path that begins in one of some folders and leads out of all of them: a link may be
    set at any time.

    The operator's own settings may name files anywhere.

    Raises:
        CheckpointError: it leads out.
    """
    path = Path(value or "")
    if not any(path.is_relative_to(folder.absolute()) for folder in folders):
        return
    with suppress(OSError, RuntimeError):  # symbolic links in a circle
        if any(path.resolve().is_relative_to(folder.resolve()) for folder in folders):
            return
    raise CheckpointError(
        f"{name} {value!r:.200}: a symbolic link out of its folder: put the file itself there"
    )


def _needs_transfer_features(settings: Settings) -> bool:
    return any(
        extension.reads_transfer_features is not None
        and extension.reads_transfer_features(settings)
        for extension in extensions()
    )


def load_predictor(settings: Settings) -> tuple[Predictor, ModelInfo]:
    """Read the checkpoint and put its model on the device; the caller warms it up.

    Raises:
        CheckpointError: the checkpoint cannot be read exactly.
        DeviceError: the device, dtype or backend is not available here.
    """
    kept = _load_kept(settings)
    if kept is None and _LIVE and "torch" not in sys.modules and _entry(settings) is not None:
        _keep_in_child(settings)
        kept = _load_kept(settings)
    return kept or _load(settings)


def _keep_in_child(settings: Settings) -> None:
    """Let a child make the graphs of a checkpoint and keep them; raises `CheckpointError` if it
    does not load.
    """
    own = settings.model_dump(
        mode="json", include={*_MATTER, "cache_dir", "compile", "coverage", "device"}
    )
    with start_python(
        __name__,
        allowed=(*COMMON, *LOADING),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # else it had the signals of this process's terminal
    ) as child:
        assert child.stdin is not None, "it is a pipe"
        assert child.stdout is not None, "it is a pipe"
        # It stays open: the child ends when this process does.
        print(json.dumps([own, list(_LIVE), str(Path.cwd())]), file=child.stdin, flush=True)
        lines = child.stdout.read().splitlines()
    reason = ""
    if child.returncode:
        reason = (
            lines.pop() if lines else f"the process that loaded it ended with {child.returncode}"
        )
    for line in lines:
        logger.warning("%s", line)
    if reason:
        raise CheckpointError(reason)


def _keep() -> None:
    """Make and keep the graphs of the settings that are read from standard input, as the child.

    Of a backbone that the parent has, the head alone.
    """
    own, live, folder = json.loads(sys.stdin.readline())
    os.chdir(folder)  # which the settings' paths are relative to; nothing is imported from it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        settings = load_settings(own)
        read = _read(settings)
        if read.key in live:
            read.keep_head("float32")
        else:
            _build(settings, read)
    except VitError as error:
        sys.exit(str(error))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def _load_kept(settings: Settings) -> tuple[Predictor, ModelInfo] | None:
    """Return what `load_predictor` does where its graphs were kept, else None."""
    # OpenMP threads that spin between operators starve the decode threads beside them. Read when
    # torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    entry = _entry(settings)
    manifest = None if entry is None else entry.manifest()
    if entry is None or manifest is None:
        return None
    key = _key(settings, manifest.backbone)
    if (shared := _LIVE.get(key)) is not None:
        _label_sets(settings, manifest.checkpoint)
        return shared, _described(settings, manifest.checkpoint, shared, key, entry.head(manifest))
    from model.runtime.start import kept_predictor  # noqa: PLC0415

    def on_read(checkpoint: Description) -> None:
        _label_sets(settings, checkpoint)  # a wrong coverage is refused before anything is compiled

    read = partial(checkpoint_from, settings)
    kept = kept_predictor(entry, read, on_read, manifest=manifest, max_batch=settings.max_batch)
    return None if kept is None else (kept, _described(settings, kept.checkpoint, kept, key))


class _Read(NamedTuple):
    """A checkpoint that was read, with the key of its backbone, its head, and what keeps its graph."""

    checkpoint: Checkpoint
    key: str
    head: Head | None
    keep: Keep | None

    def keep_head(self, dtype: str, parameters: int = 0) -> None:
        """Keep the head alone: another model keeps the graph, or this one does when it is loaded
        without it.
        """
        if self.keep is not None:
            self.keep(None, self.checkpoint, parameters, dtype)


def _load(settings: Settings) -> tuple[Predictor, ModelInfo]:
    """Return what `load_predictor` does, made of the checkpoint with torch."""
    read = _read(settings)
    if (shared := _LIVE.get(read.key)) is None:
        return _build(settings, read)
    info = _described(settings, read.checkpoint, shared, read.key, read.head)
    read.keep_head(shared.dtype, info.parameters)
    return shared, info


def _key(settings: Settings, backbone: str) -> str:
    """Return what models have in common that share a predictor."""
    return f"{backbone}-{settings.dtype}"


def _read(settings: Settings) -> _Read:
    if settings.device.startswith("cuda"):
        _show_alone(settings.device)
    from model.checkpoint.checkpoint import backbone_and_head  # noqa: PLC0415  torch takes seconds to import
    from model.checkpoint.local_files import recording  # noqa: PLC0415
    from model.runtime.openvino.kept import Keep  # noqa: PLC0415

    entry = _entry(settings)
    with recording() as files:
        checkpoint = checkpoint_from(settings)
    _label_sets(settings, checkpoint)
    backbone, head = backbone_and_head(checkpoint)
    keep = None if entry is None else Keep(entry, files, backbone, head)
    return _Read(checkpoint, _key(settings, backbone), head, keep)


def _build(settings: Settings, read: _Read) -> tuple[Predictor, ModelInfo]:
    from model.runtime.device import unusable_reason  # noqa: PLC0415  torch takes seconds to import
    from model.runtime.predictor import Predictor  # noqa: PLC0415

    keep_kernels(settings)
    device = "cuda:0" if settings.device.startswith("cuda") else settings.device
    compile_mode: str = (
        settings.compile
    )  # a process whose capture broke off starts its successor without graphs
    predictor = Predictor(
        read.checkpoint,
        device=device,
        device_name=settings.device if settings.device.startswith("cuda:") else None,
        dtype=settings.dtype,
        compile_mode="auto" if compile_mode == WITHOUT_GRAPHS else settings.compile,
        max_batch=settings.max_batch,
        graphs=compile_mode != WITHOUT_GRAPHS,
        transfer=_needs_transfer_features(settings),
        keep=read.keep,
    )
    if predictor.device == "cpu" and settings.device == "auto" and gpus_are_here():
        logger.error("THE GPU IS NOT USED: %s", unusable_reason())
    return predictor, _described(settings, read.checkpoint, predictor, read.key)


@functools.cache
def _show_alone(device: str) -> None:
    """Let this process see one device alone; what it loads later finds that done."""
    os.environ[VISIBLE] = visible_devices(device)


def _label_sets(settings: Settings, checkpoint: Description) -> LabelSets | None:
    """Return what gives the sets of labels, None where none are asked; raises where it is not
    calibrated for them.
    """
    from model.calibration import label_sets_of  # noqa: PLC0415

    coverage = settings.coverage
    return (
        None
        if coverage is None
        else label_sets_of(checkpoint.calibration, coverage, checkpoint.source)
    )


def _thresholds(settings: Settings, checkpoint: Description) -> Floats | None:
    """Return the least score of each class; raises where one is of no class."""
    if settings.thresholds is None:
        return None
    unknown = next((label for label in settings.thresholds if label not in checkpoint.labels), None)
    if unknown is not None:
        raise CheckpointError(f"thresholds: {unknown!r:.80} is no label of {checkpoint.source}")
    return np.array(
        [settings.thresholds.get(label, 0.0) for label in checkpoint.labels], np.float32
    )


def _described(
    settings: Settings,
    checkpoint: Description,
    predictor: Predictor,
    key: str,
    head: Head | None = None,
) -> ModelInfo:
    """Return the description of a model, whose head the predictor has from now on.

    Args:
        head: of a model that shares the predictor of another, if it has one of its own.
    """
    for assumption in checkpoint.assumed:
        logger.info("%s: assumed: %s", checkpoint.name, assumption)
    for note in checkpoint.notes:
        logger.info("%s: %s", checkpoint.name, note)
    facts = attributes(ModelInfo.__dataclass_fields__, checkpoint, predictor)
    facts |= {
        "name": settings.model_name or checkpoint.name,
        "loaded_at": int(time.time()),
        "backbone": key,
    }
    least = _thresholds(settings, checkpoint)
    known_by = "" if least is None else f"-{zlib.crc32(least.tobytes()):x}"
    facts |= {
        "coverage": settings.coverage,
        "head": f"{checkpoint.content}-{settings.coverage}{known_by}",
    }
    facts["has_thresholds"] = least is not None
    if key not in _LIVE:
        if settings.coverage is not None:
            predictor.set_coverage(settings.coverage)
        predictor.own, _LIVE[key] = replace(predictor.own, thresholds=least), predictor
    elif head is not None:
        more = (checkpoint.config.logits - predictor.config.logits) * (
            1 + embedding_width(checkpoint.config)
        )
        calibration = checkpoint.calibration
        facts |= {
            "calibrated_on": calibration and len(calibration.scores),
            "parameters": predictor.parameters + more,
        }
        head = replace(head, label_sets=_label_sets(settings, checkpoint), thresholds=least)
    elif not np.array_equal(
        np.asarray(least), np.asarray(predictor.own.thresholds)
    ):  # of None, too
        raise CheckpointError(
            "thresholds: another model of these weights has others, and the head is a part of both"
        )
    predictor.heads.setdefault(facts["head"], head or predictor.own)
    return ModelInfo(**facts)


def _entry(settings: Settings) -> Entry | None:
    """Return where graphs of these settings are kept, or None where none are."""
    on_gpu = settings.device != "cpu" and (settings.device != "auto" or gpus_are_here())
    folder = cache_folder(settings, "graphs")
    if folder is None or on_gpu or settings.compile != "auto":
        return None
    if importlib.util.find_spec("openvino") is None:
        return None
    from model.runtime.openvino.kept import Entry  # noqa: PLC0415  an optional package

    return Entry(folder, {name: _resolved(getattr(settings, name)) for name in _MATTER})


def keep_kernels(settings: Settings, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's compilers keep their kernels in the cache folder, unless the environment names
    another one.

    By themselves they keep them in the folder for temporary files, which containers and systems
    empty.
    """
    for name in _KERNELS.keys() - environment.keys():
        folder = cache_folder(settings, _KERNELS[name], environment)
        if folder is None:
            continue
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            logger.warning(
                "compiled kernels are not kept: %s; set VIT_CACHE_DIR to a folder that can be written",
                error,
            )
            return
        environment[name] = str(folder)


def cache_folder(
    settings: Settings, kind: str, environment: Mapping[str, str] = os.environ
) -> Path | None:
    """Return the folder that the settings name for what is kept of a kind, or None where nothing is
    kept.
    """
    if settings.cache_dir == "off":
        return None
    if settings.cache_dir is not None:
        return Path(settings.cache_dir).expanduser().absolute() / kind
    base = environment.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:  # no home
        return None
    return home / "vitserve" / kind


def _resolved(value: object) -> object:
    """Return a setting's value; of one that names a file or folder here, the absolute path."""
    if not isinstance(value, str) or value == "bundled":
        return value
    try:
        path = Path(value).expanduser().absolute()
        return str(path) if path.exists() else value
    except (OSError, ValueError, RuntimeError):
        return value


if __name__ == "__main__":
    _keep()
