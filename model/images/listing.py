"""Lists pictures and models in folders, without the files that programs leave behind."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model.errors import DatasetError, printable

_SUFFIXES: Final = """
    .jpg .jpeg .jpe .jfif .mpo .png .apng .webp .gif .bmp .dib .tif .tiff .avif .heic .heif
"""
PICTURE_SUFFIXES: Final = frozenset(_SUFFIXES.split())

# Most names in a list of a message.
MAX_LISTED: Final = 5
# Names in lower case, one per line.
_NAMES: Final = """
thumbs.db
_ds_store
ehthumbs.db
desktop.ini
__macosx
lost+found
__pycache__
$recycle.bin
system volume information
@eadir
#recycle
"""
_JUNK: Final = frozenset(_NAMES.split("\n")[1:-1]) | {"icon\r"}


@dataclass(frozen=True)
class Listing:
    """The visible entries of a folder, sorted by name; a link to a folder is a folder."""

    path: Path
    folders: tuple[Path, ...]
    files: tuple[Path, ...]

    @property
    def picture_count(self) -> int:
        """Number of pictures in the folder itself."""
        return sum(file.suffix.lower() in PICTURE_SUFFIXES for file in self.files)

    @property
    def holds_folders_only(self) -> bool:
        """Whether there are folders, and no pictures in the folder itself."""
        return bool(self.folders) and not self.picture_count


def is_junk(name: str) -> bool:
    """Return whether a name is hidden (`.git`), a backup (`x~`), or known junk (`__MACOSX`)."""
    return name.startswith(".") or name.endswith("~") or name.lower() in _JUNK


def list_folder(root: Path) -> Listing:
    """List the visible entries of a folder.

    Raises:
        DatasetError: the folder cannot be read.
    """
    folders: list[Path] = []
    files: list[Path] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if is_junk(entry.name):
                    continue
                paths = folders if entry.is_dir() else files
                paths.append(root / entry.name)
    except OSError as error:
        raise DatasetError(f"{root}: cannot be read: {error.strerror}") from error
    return Listing(root, tuple(sorted(folders, key=str)), tuple(sorted(files, key=str)))


def listed(names: Iterable[str]) -> str:
    """Return the first names of files or folders, and the number of the others."""
    every = [printable(name) for name in names]
    more = f" and {len(every) - MAX_LISTED} more" if len(every) > MAX_LISTED else ""
    return f"{', '.join(every[:MAX_LISTED])}{more}"
