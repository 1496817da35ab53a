"""The cache folder: kept graphs, and the kernels that torch's compilers keep."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from service.engine.devices import gpus_are_here
from service.model_settings import OPTIONS
from service.settings import Settings

if TYPE_CHECKING:
    from model.runtime.openvino.kept import KeptEntry

logger = logging.getLogger(__name__)

# Settings that change a graph, or the checkpoint's outputs that it is compared with, or whether the
# checkpoint is read at all.
_GRAPH_SETTINGS: Final = ("checkpoint", *OPTIONS, "models", "checkpoint_folder", "dtype")

# Folders of torch's compilers in the cache folder, by the variables that name them.
_KERNELS: Final = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
}


def graph_entry(settings: Settings) -> KeptEntry | None:
    """Return the entry of kept graphs for these settings, or None if their graphs are not kept."""
    on_gpu = settings.device != "cpu" and (settings.device != "auto" or gpus_are_here())
    folder = cache_folder(settings, "graphs")
    if folder is None or on_gpu or settings.compile != "auto":
        return None
    if importlib.util.find_spec("openvino") is None:
        return None
    from model.runtime.openvino.kept import KeptEntry  # noqa: PLC0415  an optional package

    return KeptEntry(folder, {name: _resolved(getattr(settings, name)) for name in _GRAPH_SETTINGS})


def keep_kernels(settings: Settings) -> None:
    """Let torch's compilers keep their kernels in the cache folder.

    By default they use the folder for temporary files, which containers and systems empty. Folders
    that the environment names stay.
    """
    for name in _KERNELS.keys() - os.environ.keys():
        folder = cache_folder(settings, _KERNELS[name])
        if folder is None:
            continue
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            logger.warning(
                "compiled kernels are not kept: %s; set VIT_CACHE_DIR to a writable folder", error
            )
            return
        os.environ[name] = str(folder)


def cache_folder(settings: Settings, kind: str) -> Path | None:
    """Return the folder of one kind of cached files, or None if they are not kept."""
    if settings.cache_dir == "off":
        return None
    if settings.cache_dir is not None:
        return Path(settings.cache_dir).expanduser().absolute() / kind
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:  # the user has no home folder
        return None
    return home / "vitserve" / kind


def _resolved(value: object) -> object:
    """Return the absolute path if a setting's value names a file or folder here, or the value."""
    if not isinstance(value, str) or value == "bundled":
        return value
    try:
        path = Path(value).expanduser().absolute()
        return str(path) if path.exists() else value
    except (OSError, ValueError, RuntimeError):
        return value
