"""Recognises the file of a taught head. No torch is needed."""

from pathlib import Path
from typing import Final

# Value of `format` in the metadata of such a file.
FORMAT: Final = "vitserve-head"
_MOST_METADATA: Final = 4 << 20


def is_taught_head(path: Path) -> bool:
    """Return whether the metadata of a file says that it is a taught head; raises OSError."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return f'"{FORMAT}"'.encode() in file.read(min(size, _MOST_METADATA))
