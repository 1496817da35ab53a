"""A head that was fitted to examples, as one safetensors file: weights, labels, thresholds, what it knows of itself.

weight float32 [C, D], bias float32 [C], known float16 [M, D]; the metadata has the rest as text
"""

import json
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from model.errors import CheckpointError
from model.heads import Head, Known

FORMAT: Final = "vitserve-head"
_VERSION: Final = "1"
_MOST_METADATA: Final = 4 << 20


class TaughtHead(NamedTuple):
    """A head, and where it comes from.

    Attributes:
        backbone: names the backbone whose features it reads, and how pictures become pixels.
        model: with which it was begun.
        statistics: what it knows of itself, as JSON.
    """

    head: Head
    backbone: str
    model: str
    statistics: str

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        head = self.head
        assert head.weight is not None
        assert head.known is not None
        about = {"format": FORMAT, "version": _VERSION, "backbone": self.backbone, "model": self.model}
        about |= {"statistics": self.statistics, "labels": json.dumps(head.labels)}
        about |= {"temperature": repr(head.temperature), "limit": repr(head.known.limit)}
        known = head.known.examples.astype(np.float16)
        return save({"weight": head.weight, "bias": np.asarray(head.bias), "known": known}, about)

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Self:
        """Return the head in a file, which messages call `where`; raises `CheckpointError` where it holds none."""
        try:
            arrays = load(content)
            about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
            if (about["format"], about["version"]) != (FORMAT, _VERSION):
                raise ValueError
            weight, bias, known = arrays["weight"], arrays["bias"], arrays["known"]
            labels = tuple(map(str, json.loads(about["labels"])))
            if weight.shape != (len(labels), known.shape[1]) or bias.shape != (len(labels),):
                raise ValueError
            limit = Known(known.astype(np.float16).astype(np.float32), float(about["limit"]))
            found = Head(labels, False, float(about["temperature"]), weight=weight, bias=bias, known=limit)
            return cls(found, about["backbone"], about["model"], about["statistics"])
        except (SafetensorError, LookupError, ValueError, TypeError):
            raise CheckpointError(f"{where}: not a taught head, or damaged") from None


def is_taught_head(path: Path) -> bool:
    """Return whether a path leads to a file of a taught head, by its metadata; raises OSError."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return f'"{FORMAT}"'.encode() in file.read(min(size, _MOST_METADATA))
