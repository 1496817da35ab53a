"""A head fitted to examples, as one safetensors file.

The arrays are weight float32 [C, D], bias float32 [C], known float16 [M, D] and known_labels int32
[M]; older files lack the last, and their examples count as one label. The metadata has
the labels, thresholds and statistics as text. It also has the name of the features that the head
reads, and the weights of their parts; in files without these, `head` and one part.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Json, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from model.config import NetworkConfig
from model.errors import CheckpointError, InputError, first_problem
from model.extensions.taught.known_examples import MAX_KNOWN_EXAMPLES, KnownExamples, part_weights
from model.head_files import FORMAT
from model.heads import Head
from model.label_texts import checked_texts
from model.outputs import Pooling, embedding_width, transfer_pool

_VERSION: Final = "1"
_ARRAYS: Final = "bias float32, known float16, known_labels int32, weight float32"
# Longest known example; in float16, the length 1 is rounded.
_MOST_LENGTH: Final = 1.01
# Most bytes of a file: 1,000 labels and 2,000 examples of 8,192 features take half of it.
_MOST_BYTES: Final = 128 << 20
_MOST_LABELS: Final = 100_000

Array = NDArray[Any]


class Features(NamedTuple):
    """The features of a picture that a head reads.

    Attributes:
        pool: which embedding.
        parts: number of equally long vectors in it.
    """

    pool: Pooling = "head"
    parts: int = 1

    @classmethod
    def of(cls, config: NetworkConfig) -> Self:
        """Return the features that new heads of a network read."""
        pool = transfer_pool(config)
        if pool != "transfer":
            return cls()
        return cls(pool, embedding_width(config, pool) // config.width)

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the features of a backbone's name, which ends with their `suffix`."""
        match = re.search(r"-transfer(\d{1,2})$", name)
        return cls("transfer", int(match[1])) if match else cls()

    @property
    def suffix(self) -> str:
        """Return the end of the backbone's name: empty for `head`, as in older files."""
        return "" if self.pool == "head" else f"-{self.pool}{self.parts}"

    @property
    def dtype(self) -> str:
        """Return the dtype of stored examples: float16 is enough for transfer features."""
        return "<f4" if self.pool == "head" else "<f2"

    def scales(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the divisors of values [N, D] that make each part vary by its weight: float32 [D].

        Tokens of earlier blocks vary less: without this the last block would decide alone.
        """
        by_part = (values - values.mean(axis=0)).reshape(len(values), self.parts, -1)
        deviations = np.sqrt(np.square(by_part, dtype=np.float64).mean(axis=(0, 2)))
        divisors = np.where(deviations > 0, deviations, 1) / part_weights(self.parts)
        scales = np.repeat(divisors, by_part.shape[2])
        return scales.astype(np.float32)


class _Metadata(BaseModel):
    """The texts of a file."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["vitserve-head"]
    version: Literal["1"]
    backbone: str
    model: str
    statistics: str
    labels: Json[Annotated[list[Any], Field(min_length=2)]]
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)]
    limit: FiniteFloat
    features: Pooling = "head"
    weights: Json[
        Annotated[
            list[Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]],
            Field(min_length=1),
        ]
    ] = [1.0]


class TaughtHead(NamedTuple):
    """A head and its origin.

    Attributes:
        head: the head itself.
        backbone: name of the backbone whose features the head reads, and of the preprocessing.
        model: the model that the head was started with.
        statistics: how well the head does, as JSON.
    """

    head: Head
    backbone: str
    model: str
    statistics: str

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        head = self.head
        assert head.weight is not None
        assert isinstance(head.known, KnownExamples)
        metadata = {
            "format": FORMAT,
            "version": _VERSION,
            "backbone": self.backbone,
            "model": self.model,
            "statistics": self.statistics,
            "labels": json.dumps(head.labels),
            "temperature": repr(head.temperature),
            "limit": repr(head.known.limit),
            "features": head.features,
            "weights": json.dumps(head.known.weights),
        }
        known = head.known.examples.astype(np.float16)
        arrays = {
            "weight": head.weight,
            "bias": np.asarray(head.bias),
            "known": known,
            "known_labels": head.known.labels,
        }
        return save(arrays, metadata)

    @classmethod
    def from_bytes(cls, content: bytes, source: str) -> Self:
        """Return the head in a file, which messages call `source`.

        Raises:
            CheckpointError: the content is not a taught head, or one that cannot answer because
                its shapes or dtypes differ or its numbers are unusable.
        """
        damaged = f"{source}: not a taught head, or damaged"
        try:
            arrays = load(content)
            arrays.setdefault("known_labels", np.zeros(len(arrays.get("known", ())), np.int32))
            header_end = 8 + int.from_bytes(content[:8], "little")
            metadata = _Metadata.model_validate(json.loads(content[8:header_end])["__metadata__"])
            labels = checked_texts(metadata.labels, "labels", _MOST_LABELS, allows_hidden=True)
            _check_arrays(labels, len(metadata.weights), arrays)
        except ValidationError as error:
            raise CheckpointError(f"{damaged}: {first_problem(error)}") from None
        except InputError as error:
            raise CheckpointError(f"{damaged}: {error}") from None
        except (SafetensorError, LookupError, ValueError, TypeError, RecursionError):
            raise CheckpointError(damaged) from None
        head = Head(
            labels,
            independent=False,
            temperature=metadata.temperature,
            weight=arrays["weight"],
            bias=arrays["bias"],
            features=metadata.features,
            known=KnownExamples(
                arrays["known"].astype(np.float32),
                arrays["known_labels"],
                metadata.limit,
                tuple(metadata.weights),
            ),
        )
        return cls(head, metadata.backbone, metadata.model, metadata.statistics)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Return the head in a file.

        Raises:
            OSError: the file cannot be read.
            CheckpointError: as `from_bytes`, or the file is too large.
        """
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            size = path.stat().st_size
            raise CheckpointError(
                f"{path.name}: {size} bytes: a taught head has at most {_MOST_BYTES}"
            )
        return cls.from_bytes(content, path.name)


def _check_arrays(labels: Sequence[str], parts: int, arrays: Mapping[str, Array]) -> None:
    """Raise `InputError` unless the arrays of a file belong to a head.

    Args:
        labels: labels of the head.
        parts: number of parts of the features.
        arrays: arrays of the file by name.
    """
    if len(set(labels)) < len(labels):
        raise InputError("labels", "a label comes twice")
    kinds = ", ".join(sorted(f"{name} {array.dtype}" for name, array in arrays.items()))
    if kinds != _ARRAYS:
        raise InputError("arrays", f"its arrays are {kinds}, not {_ARRAYS}")
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise InputError(name, f"{name}: numbers are not finite")
    _check_shapes(len(labels), parts, arrays)
    known = arrays["known"].astype(np.float32)
    if np.linalg.norm(known, axis=1).max() > _MOST_LENGTH:
        raise InputError("known", "known examples are longer than 1")
    numbers = arrays["known_labels"]
    if numbers[0] < 0 or numbers[-1] >= len(labels) or (np.diff(numbers) < 0).any():
        raise InputError("known_labels", "known_labels are not ascending numbers of labels")


def _check_shapes(labels: int, parts: int, arrays: Mapping[str, Array]) -> None:
    """Raise `InputError` unless arrays of a head have the shapes of so many labels and parts."""
    known = arrays["known"]
    if known.ndim != 2 or not 1 <= len(known) <= MAX_KNOWN_EXAMPLES:
        raise InputError("known", f"known has shape {known.shape}")
    examples, width = known.shape
    shapes = {"weight": (labels, width), "bias": (labels,), "known_labels": (examples,)}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise InputError(name, f"{name} has shape {arrays[name].shape}, not {shape}")
    if width % parts:
        raise InputError("weights", f"{parts} weights of parts for {width} features")
