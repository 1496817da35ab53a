"""A head fitted to examples, as one safetensors file.

The arrays are weight float32 [C, D], bias float32 [C], known float16 [M, D] and known_labels int32
[M]; older files lack the last, and their examples count as one label. The metadata has
the labels, thresholds and statistics as text. It also has the name of the features that the head
reads, and the weights of their parts; in files without these, `head` and one part.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from model.config import NetworkConfig
from model.errors import CheckpointError, InputError
from model.extensions.taught.known_examples import MAX_KNOWN_EXAMPLES, KnownExamples, part_weights
from model.head_files import FORMAT
from model.heads import Head
from model.label_texts import checked_texts
from model.outputs import POOLINGS, Pooling, embedding_width, transfer_pool

_VERSION: Final = "1"
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
        arrays = {"weight": head.weight, "bias": np.asarray(head.bias), "known": known}
        if head.known.labels is not None:
            arrays["known_labels"] = head.known.labels
        return save(arrays, metadata)

    @classmethod
    def from_bytes(cls, content: bytes, source: str) -> Self:
        """Return the head in a file, which messages call `source`.

        Raises:
            CheckpointError: the content is not a taught head, or one that cannot answer because
                its shapes or dtypes differ or its numbers are not finite.
        """
        damaged = f"{source}: not a taught head, or damaged"
        try:
            arrays = load(content)
            header_end = 8 + int.from_bytes(content[:8], "little")
            metadata = json.loads(content[8:header_end])["__metadata__"]
            taught = cls._of(arrays, metadata)
        except InputError as error:
            raise CheckpointError(f"{damaged}: {error}") from None
        except KeyError as error:
            raise CheckpointError(f"{damaged}: {error} is missing") from None
        except (SafetensorError, LookupError, ValueError, TypeError, RecursionError):
            raise CheckpointError(damaged) from None
        problem = _problem_of_arrays(taught.head.labels, arrays)
        problem = problem or _problem_of_head(taught.head)
        if not problem and "known_labels" in arrays:
            problem = _problem_of_known_labels(arrays["known_labels"], len(arrays["known"]))
        if problem:
            raise CheckpointError(f"{damaged}: {problem}")
        return taught

    @classmethod
    def _of(cls, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> Self:
        """Return the head of a file's arrays and metadata, still without checks of its numbers."""
        if (metadata["format"], metadata["version"]) != (FORMAT, _VERSION):
            raise ValueError("another format or version")
        features: Any = metadata.get("features", "head")
        head = Head(
            checked_texts(
                json.loads(metadata["labels"]), "labels", _MOST_LABELS, allows_hidden=True
            ),
            independent=False,
            temperature=float(metadata["temperature"]),
            weight=arrays["weight"],
            bias=arrays["bias"],
            features=features,
            known=KnownExamples(
                arrays["known"].astype(np.float32),
                float(metadata["limit"]),
                tuple(map(float, json.loads(metadata.get("weights", "[1]")))),
                arrays.get("known_labels"),
            ),
        )
        return cls(head, metadata["backbone"], metadata["model"], metadata["statistics"])

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


def _problem_of_arrays(labels: Sequence[str], arrays: Mapping[str, Array]) -> str:
    """Return the problem with the arrays of a head, or an empty text."""
    weight = arrays["weight"]
    bias = arrays["bias"]
    known = arrays["known"]
    if len(set(labels)) < len(labels):
        return "a label comes twice"
    dtypes = [array.dtype.name for array in (weight, bias, known)]
    if dtypes != ["float32", "float32", "float16"]:
        return f"weight, bias and known are {', '.join(dtypes)}, not float32, float32, float16"
    if weight.ndim != 2 or known.ndim != 2 or not 1 <= len(known) <= MAX_KNOWN_EXAMPLES:
        return f"weight and known have shapes {weight.shape} and {known.shape}"
    if weight.shape != (len(labels), known.shape[1]) or bias.shape != (len(labels),):
        shapes = f"{weight.shape}, {bias.shape}, {known.shape}"
        return f"weight, bias and known of {len(labels)} labels have shapes {shapes}"
    if not all(np.isfinite(array).all() for array in (weight, bias, known)):
        return "numbers are not finite"
    return ""


def _problem_of_known_labels(known_labels: Array, examples: int) -> str:
    """Return the problem with the labels of the known examples, or an empty text."""
    is_int32 = known_labels.dtype == np.int32
    if is_int32 and known_labels.shape == (examples,) and known_labels.min() >= 0:
        return ""
    return f"known_labels are not a label's number for each of {examples} examples"


def _problem_of_head(head: Head) -> str:
    """Return the problem with a head whose arrays are right, or an empty text."""
    assert isinstance(head.known, KnownExamples)
    if not (math.isfinite(head.temperature) and head.temperature > 0):
        return f"temperature is {head.temperature}, not a positive number"
    if not math.isfinite(head.known.limit):
        return f"limit is {head.known.limit}, not a finite number"
    if head.features not in POOLINGS:
        return f"it reads {head.features!r:.50}, and this version reads {', '.join(POOLINGS)}"
    weights = head.known.weights
    width = head.known.examples.shape[1]
    if not weights or width % len(weights):
        return f"{len(weights)} weights of parts for {width} features"
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        return f"weights of parts are {weights}, not positive numbers"
    return ""
