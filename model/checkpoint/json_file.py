"""JSON from a file of bounded size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from model.checkpoint.refusals import reading
from model.errors import CheckpointError

_MAX_BYTES: Final = 64 << 20


def read_json(path: Path, where: str | None = None) -> dict[str, Any]:
    """Return a JSON object from a file.

    Raises:
        CheckpointError: no such file, not JSON, or not an object.
    """
    value = read_json_value(path, where)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where or path}: holds a {type(value).__name__}, expected an object")
    return value


def read_json_value(path: Path, where: str | None = None) -> Any:
    """Return any JSON value from a file.

    Raises:
        CheckpointError: no such file, or not JSON.
    """
    where = where or str(path)
    with reading(where, "not JSON", ValueError, RecursionError):
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{where}: larger than {_MAX_BYTES} bytes")
        return json.loads(path.read_bytes())
