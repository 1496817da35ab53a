"""The paths that settings of a model name: which ones are files, and where they may lie."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from service.errors import Forbidden, InvalidParameter

# A reference to the hub, unless a file here has this name.
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?(:\w[\w./-]*)?")
_SUFFIX: Final = re.compile(r"\.[A-Za-z0-9]{1,12}\Z")

_MAX_PATH: Final = 4000


def located(setting: str, value: object, folder: Path, others: Sequence[Path] = ()) -> str | None:
    """Return the absolute path of the file that a setting names, or None if it does not name one.

    Args:
        setting: name of a setting in `PATHS`.
        value: value that may come from a client.
        folder: folder that the value is relative to, and that contains the file.
        others: further folders that may contain the file.

    Raises:
        InvalidParameter: the value cannot be a path.
        Forbidden: the file is outside these folders, once all links are followed.
    """
    if not isinstance(value, str) or not value.isprintable() or len(value.encode()) > _MAX_PATH:
        raise InvalidParameter(f"{setting}: expected a path of at most {_MAX_PATH} bytes")
    is_here = _exists(folder / value)
    if not is_here and not _names_file(setting, value):
        return None
    # Symbolic links in a circle, or an unknown home folder.
    with suppress(OSError, RuntimeError):
        path = folder / Path(value).expanduser()
        if any(path.resolve().is_relative_to(top.resolve()) for top in (folder, *others)):
            return str(path.absolute())
    below = " or ".join(map(str, (folder, *others)))
    remedy = "" if others else ", or name a folder that holds it in VIT_CHECKPOINT_FOLDER"
    raise Forbidden(
        f"{setting} {value!r:.200}: this file is not below {below}: put it there{remedy}"
    )


def _names_file(setting: str, value: str) -> bool:
    """Return whether a value is a path, although the folder does not contain this file."""
    if setting in ("checkpoint", "base"):
        is_elsewhere = value != "bundled" and _exists(Path(value))
        return is_elsewhere or not (value == "bundled" or _HUB_ID.fullmatch(value))
    if setting in ("preprocess", "labels") and value.startswith(("{", "[")):
        return False
    looks_like_path = os.sep in value or value.startswith("~") or _SUFFIX.search(value) is not None
    return setting == "keys" or looks_like_path or _is_file(Path(value))


def _exists(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return path.exists()
    return False


def _is_file(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return path.is_file()
    return False
