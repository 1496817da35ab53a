"""Notes for the user about a folder of pictures."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from model.images.listing import listed


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
