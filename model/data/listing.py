"""The visible entries of folders, and messages that name some of them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from model.data.junk import is_junk
from model.data.split_names import role_of
from model.errors import DatasetError, printable

_SUFFIXES: Final = """
    .jpg .jpeg .jpe .jfif .mpo .png .apng .webp .gif .bmp .dib .tif .tiff .avif .heic .heif
"""
PICTURE_SUFFIXES: Final = frozenset(_SUFFIXES.split())

# Most names in a list of a message.
MAX_LISTED: Final = 5


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

    @property
    def holds_splits(self) -> bool:
        """Whether all its folders have names of splits, with at least two different splits."""
        roles = [role_of(folder.name) for folder in self.folders]
        return None not in roles and len(set(roles)) > 1

    @property
    def wraps_itself(self) -> bool:
        """Whether it holds no pictures and one folder, which has the same name."""
        if len(self.folders) != 1 or self.picture_count:
            return False
        return self.folders[0].name.casefold() == self.path.resolve().name.casefold()

    def unwrapped(self) -> "Listing":
        """Return the entries of the only folder, if that has this name or the class folders."""
        if len(self.folders) != 1 or self.picture_count:
            return self
        inner = list_folder(self.folders[0])
        if self.wraps_itself or inner.holds_folders_only:
            return Listing(self.path, inner.folders, (*self.files, *inner.files))
        return self


@dataclass
class Remarks:
    """Notes for the user about a folder.

    Attributes:
        root: names are relative to it.
        ignored: files and folders outside the class folders.
        irregular: pipes, sockets and devices in class folders.
        nested: folders below class folders, whose pictures count for the class.
    """

    root: Path
    ignored: list[Path] = field(default_factory=list)
    irregular: list[Path] = field(default_factory=list)
    nested: set[Path] = field(default_factory=set)

    def lines(self) -> tuple[str, ...]:
        """Return the notes, one per line."""
        kinds = [
            ("outside the class folders", self.ignored),
            ("not regular files", self.irregular),
        ]
        left_out = [f"{len(paths)} {kind} ({self._names(paths)})" for kind, paths in kinds if paths]
        lines = [f"{self.root}: left out: {'; '.join(left_out)}"] if left_out else []
        if self.nested:
            lines.append(
                f"{self.root}: pictures in folders below a class folder count for the class: "
                f"{self._names(sorted(self.nested))}"
            )
        return tuple(lines)

    def _names(self, paths: Iterable[Path]) -> str:
        return listed(str(path.relative_to(self.root)) for path in paths)


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


def visible_folders(root: Path) -> tuple[Path, ...]:
    """Return the folders in a folder that are not junk, sorted by name.

    Raises:
        DatasetError: the folder cannot be read.
    """
    return list_folder(root).folders


def listed(names: Iterable[str]) -> str:
    """Return the first names of files or folders, and the number of the others."""
    every = [printable(name) for name in names]
    more = f" and {len(every) - MAX_LISTED} more" if len(every) > MAX_LISTED else ""
    return f"{', '.join(every[:MAX_LISTED])}{more}"
