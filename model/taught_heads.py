"""A head that was fitted to examples, as one safetensors file: weights, labels, thresholds, what it
knows of itself.

weight float32 [C, D], bias float32 [C], known float16 [M, D]; the metadata has the rest as text,
with the name of the features that the head reads (`head` if a file names none) and the number of
their parts
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from model.config import NetworkConfig
from model.errors import CheckpointError, InputError
from model.heads import MOST_KNOWN, Head, Known, checked_texts
from model.outputs import POOLINGS, Pooling, embedding_parts, transfer_pool

FORMAT: Final = "vitserve-head"
_VERSION: Final = "1"
_MOST_METADATA: Final = 4 << 20
# Of a file: 1,000 labels and 2,000 examples of 8,192 features take half.
_MOST_BYTES: Final = 128 << 20
_MOST_LABELS: Final = 100_000

Array = NDArray[Any]


class Features(NamedTuple):
    """Which features of a picture a head reads.

    Attributes:
        pool: which embedding.
        parts: number of vectors of equal length that it is made of.
    """

    pool: Pooling = "head"
    parts: int = 1

    @classmethod
    def of(cls, config: NetworkConfig) -> Self:
        """Return what new heads of a network read."""
        pool = transfer_pool(config)
        return cls(pool, embedding_parts(config, pool))

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the features that a name is of, which ends as `suffix` says."""
        found = re.search(r"-transfer(\d{1,2})$", name)
        return cls("transfer", int(found[1])) if found else cls()

    @property
    def suffix(self) -> str:
        """Return what their name ends with: nothing for what the checkpoint's own head reads, as in
        older files.
        """
        return "" if self.pool == "head" else f"-{self.pool}{self.parts}"

    @property
    def dtype(self) -> str:
        """Return the dtype that examples are kept in: float16 is enough for transfer features
        (docs/teach.md).
        """
        return "<f4" if self.pool == "head" else "<f2"

    def scales(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what values [N, D] are divided by, so that all parts vary alike: float32 [D].

        Tokens of earlier blocks vary less: without this the last block would decide alone.
        """
        by_part = (values - values.mean(axis=0)).reshape(len(values), self.parts, -1)
        deviations = np.sqrt(np.square(by_part, dtype=np.float64).mean(axis=(0, 2)))
        scales = np.repeat(np.where(deviations > 0, deviations, 1), by_part.shape[2])
        return scales.astype(np.float32)


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
        about = {
            "format": FORMAT,
            "version": _VERSION,
            "backbone": self.backbone,
            "model": self.model,
        }
        about |= {"statistics": self.statistics, "labels": json.dumps(head.labels)}
        about |= {"temperature": repr(head.temperature), "limit": repr(head.known.limit)}
        about |= {"features": head.features, "parts": repr(head.known.parts)}
        known = head.known.examples.astype(np.float16)
        return save({"weight": head.weight, "bias": np.asarray(head.bias), "known": known}, about)

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Self:
        """Return the head in a file, which messages call `where`.

        Raises:
            CheckpointError: it holds none, or one that cannot answer: of other shapes or dtypes, or
            not finite.
        """
        damaged = f"{where}: not a taught head, or damaged"
        try:
            arrays = load(content)
            about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])[
                "__metadata__"
            ]
            if (about["format"], about["version"]) != (FORMAT, _VERSION):
                raise ValueError
            labels = checked_texts(json.loads(about["labels"]), "labels", most=_MOST_LABELS)
            weight, bias, known = (arrays[name] for name in ("weight", "bias", "known"))
            temperature, limit = float(about["temperature"]), float(about["limit"])
            backbone, model, statistics = about["backbone"], about["model"], about["statistics"]
            features, parts = about.get("features", "head"), int(about.get("parts", "1"))
        except InputError as error:
            raise CheckpointError(f"{damaged}: {error}") from None
        except (SafetensorError, LookupError, ValueError, TypeError, RecursionError):
            raise CheckpointError(damaged) from None
        problem = _problem(labels, weight, bias, known) or _problem_of_numbers(temperature, limit)
        if not problem and (features not in POOLINGS or parts < 1 or known.shape[1] % parts):
            problem = f"it reads {features!r:.50} of {parts} parts, and this version reads {', '.join(POOLINGS)}"
        if problem:
            raise CheckpointError(f"{damaged}: {problem}")
        distances = Known(known.astype(np.float32), limit, parts)
        head = Head(
            labels, False, temperature, weight=weight, bias=bias, features=features, known=distances
        )
        return cls(head, backbone, model, statistics)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Return the head in a file; raises OSError, and `CheckpointError` as `from_bytes` or of a
        file too large.
        """
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            size = path.stat().st_size
            raise CheckpointError(
                f"{path.name}: {size} bytes: a taught head has at most {_MOST_BYTES}"
            )
        return cls.from_bytes(content, path.name)


def _problem(labels: Sequence[str], weight: Array, bias: Array, known: Array) -> str:
    """Return what is wrong with the arrays of a head, or an empty text."""
    if len(set(labels)) < len(labels):
        return "a label comes twice"
    if [each.dtype.name for each in (weight, bias, known)] != ["float32", "float32", "float16"]:
        return f"weight, bias and known are {weight.dtype}, {bias.dtype} and {known.dtype}, not float32 and float16"
    if weight.ndim != 2 or known.ndim != 2 or not 1 <= len(known) <= MOST_KNOWN:
        return f"weight and known have shapes {weight.shape} and {known.shape}"
    if weight.shape != (len(labels), known.shape[1]) or bias.shape != (len(labels),):
        return f"weight, bias and known of {len(labels)} labels have shapes {weight.shape}, {bias.shape}, {known.shape}"
    if not all(np.isfinite(each).all() for each in (weight, bias, known)):
        return "numbers are not finite"
    return ""


def _problem_of_numbers(temperature: float, limit: float) -> str:
    if not (math.isfinite(temperature) and temperature > 0):
        return f"temperature is {temperature}, not a positive number"
    return "" if math.isfinite(limit) else f"limit is {limit}, not a finite number"


def is_taught_head(path: Path) -> bool:
    """Return whether a path leads to a file of a taught head, by its metadata; raises OSError."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return f'"{FORMAT}"'.encode() in file.read(min(size, _MOST_METADATA))
