"""Files of labels, which are read, or refused by a message."""

from pathlib import Path

import pytest

from model.checkpoint.labels import read_labels
from model.errors import CheckpointError

LABELS = ("cat", "dog", "red fox")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")


def assert_read(file: Path, text: str, encoding: str) -> None:
    """Check that a file of this text, with lines as on Windows, gives `LABELS`."""
    file.write_bytes(text.replace("\n", "\r\n").encode(encoding))
    assert read_labels(str(file), 3) == LABELS
    assert read_labels(str(file), None) == LABELS


def assert_refused(file: Path, text: str, message: str) -> None:
    """Check that a file of this text is refused as labels of two classes, by its name."""
    file.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as refusal:
        read_labels(str(file), 2)
    assert str(file) in str(refusal.value)
