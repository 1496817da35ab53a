"""Names of files and folders that programs leave everywhere, and that nobody means by a folder of
data or of models.
"""

from typing import Final

_NAMES: Final = frozenset(
    {
        "thumbs.db",
        "_ds_store",
        "ehthumbs.db",
        "desktop.ini",
        "__macosx",
        "lost+found",
        "__pycache__",
        "$recycle.bin",
        "icon\r",
    }
    | {"system volume information", "@eadir", "#recycle"}
)


def is_junk(name: str) -> bool:
    """Return whether a name is hidden (`.ipynb_checkpoints`), a backup (`x~`), or one of those
    (`__MACOSX`).
    """
    return name.startswith(".") or name.endswith("~") or name.lower() in _NAMES
