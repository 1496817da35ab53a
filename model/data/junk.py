"""Names of files and folders that programs leave behind, and that are never data or models."""

from typing import Final

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


def is_junk(name: str) -> bool:
    """Return whether a name is hidden (`.git`), a backup (`x~`), or known junk (`__MACOSX`)."""
    return name.startswith(".") or name.endswith("~") or name.lower() in _JUNK
