"""Notes for the user about a folder of pictures."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from model.images.listing import listed

# Suffixes of tables that may list pictures with labels.
_TABLES: Final = frozenset({".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx"})


def unread_tables(root: Path, files: Iterable[Path]) -> str:
    """Return that labels are not read from the tables among these files; empty without tables."""
    tables = [str(path.relative_to(root)) for path in files if path.suffix.lower() in _TABLES]
    if not tables:
        return ""
    return f"labels are the names of folders, and not read from a table ({listed(tables)})"


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
        tables = unread_tables(self.root, self.ignored)
        if tables:
            lines.append(f"{self.root}: {tables}: if they differ, move the pictures")
        if self.nested:
            lines.append(
                f"{self.root}: pictures in folders below a class folder count for the class: "
                f"{self._names(sorted(self.nested))}"
            )
        return tuple(lines)

    def _names(self, paths: Iterable[Path]) -> str:
        return listed(str(path.relative_to(self.root)) for path in paths)
