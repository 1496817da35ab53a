"""Opens the checkpoint that the operator names: the bundled one, a folder, a file or a hub id."""

import re
from pathlib import Path
from typing import Final

from model.checkpoint.files import Files, SingleFile
from model.checkpoint.local_files import resolved_source
from model.errors import CheckpointError
from model.extension import extensions, resolve
from model.head_files import is_taught_head

# The checkpoint that travels with the code.
BUNDLED: Final = Path(__file__).resolve().parent.parent / "weights" / "cifar10"
# Addresses of a model on the hub.
_HUB_ADDRESS: Final = re.compile(
    r"(?:https?://(?:huggingface\.co|hf\.co)|hf:/|hf[-_]hub:|hf:)/?([\w.-]+/[\w.-]+)"
    r"(?:/tree/([\w.-]+)/?)?.*"
)


def open_source(source: str) -> Files:
    """Return the files of a source; an existing path is never looked for elsewhere.

    Args:
        source: `bundled`, a folder, a file, or a hub id `owner/name[@revision][:subfolder]`.

    Raises:
        CheckpointError: the source does not exist, or is a taught head.
    """
    path = BUNDLED if source == "bundled" else Path(source).expanduser()
    resolved = resolved_source(path, source)
    if resolved is None:
        remote = open_remote(source)
        if remote is not None:
            return remote
        raise CheckpointError(
            f"{source}: no such folder or file, and not a hub id (owner/name){_meant(source)}"
        )
    if is_taught_head(path):
        raise CheckpointError(
            f"{source}: a taught head: a folder of --models takes it, with a model that has its "
            "backbone"
        )
    return Files(path, source) if resolved.is_dir() else SingleFile(path, source)


def open_remote(source: str) -> Files | None:
    """Return the files that an extension finds under this name; None for an unknown name."""
    for extension in extensions():
        for name in extension.sources:
            files: Files | None = resolve(name, extension)(source)
            if files is not None:
                return files
    return None


def _meant(source: str) -> str:
    """Return a suggestion for a source that is a URL; empty if the URL is unknown."""
    address = _HUB_ADDRESS.fullmatch(source)
    if address is not None:
        revision = f"@{address[2]}" if address[2] else ""
        return f": did you mean {address[1]}{revision}?"
    if source.startswith("file://"):
        return f": did you mean {source.removeprefix('file://')}?"
    if "://" in source:
        return ": download it, and give the folder or file on this machine"
    return ""
