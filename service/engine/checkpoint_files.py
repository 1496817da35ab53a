"""Reads the checkpoint that the settings name, from the files that it may read."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from model.errors import CheckpointError
from service.model_settings import OPTIONS, PATHS
from service.settings import Settings

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint


def link_torch() -> None:
    """Link torch's largest library, so that `import torch` does not stop other threads for long.

    The import holds the interpreter's lock while the system links: for 0.4 s, and for seconds on a
    busy machine. No effect if the library is missing or already linked.
    """
    if "torch" in sys.modules or not sys.platform.startswith("linux"):
        return
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
        # A call through ctypes releases the lock; `ctypes.CDLL(library)` does not.
        ctypes.CDLL(None).dlopen(os.fsencode(library), os.RTLD_NOW)


def checkpoint_from(settings: Settings) -> Checkpoint:
    """Read the checkpoint; raises `CheckpointError` if it cannot be read exactly."""
    link_torch()
    from model.checkpoint import load_checkpoint  # noqa: PLC0415  torch takes seconds to import

    models = () if settings.models is None else (Path(settings.models).expanduser(),)
    named = () if settings.checkpoint_folder is None else (Path(settings.checkpoint_folder),)
    folders = (*models, *named)
    for name in PATHS:
        _require_inside(name, getattr(settings, name), folders)
    options = {name: getattr(settings, name) for name in OPTIONS}
    below = folders if _lies_below(settings.checkpoint, folders) else None
    return load_checkpoint(
        settings.checkpoint,
        bases_below=below,
        hub_bases=_lies_below(settings.checkpoint, models),
        **options,
    )


def _lies_below(source: str, folders: Iterable[Path]) -> bool:
    """Return whether a path is below one of the folders, before or after following its links.

    Links that cannot be followed count as below.
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
    """Refuse a path that starts in one of the folders and leads out of all of them.

    It is checked at each load, because a link may be set at any time. The operator's own settings
    may name files anywhere.

    Raises:
        CheckpointError: the path leads out.
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
