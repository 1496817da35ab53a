"""`int8.json` beside a native checkpoint: how its network is computed in int8, and how often that agrees with float32.

The graph in int8 is made of the checkpoint itself at each start. So the file holds a range for each product, and no
operations and no weights that could be others than the checkpoint's.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from model.checkpoint import Checkpoint
from model.checkpoint.files import Folder
from model.checkpoint.refusals import validating
from model.errors import CheckpointError
from model.runtime.backend import INT8_RECORD
from model.runtime.openvino.quantization import Comparison, Quantised, Way


class ProductRecord(BaseModel):
    """How a product is computed: the range of its input is for `static` alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    way: Literal["static", "dynamic", "floating"]
    low: Annotated[float, Field(ge=-1e30, le=0)]
    high: Annotated[float, Field(ge=0, le=1e30)]


class Int8Record(BaseModel):
    """What `int8.json` holds.

    Attributes:
        checkpoint: `checkpoint_digest` of the checkpoint.
        agreement: share of the pictures with float32's best class; none of them is of a file that it was calibrated on.
        kl: mean divergence of the softmax from float32's, in nats.
        pictures, calibrated_on: how many views of pictures.
        dtype: what stays in floating point was computed in, as the agreement was measured.
        products: by their names in the graph.
        versions: of what made the graph.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["vitserve-int8"] = "vitserve-int8"
    version: Annotated[int, Field(ge=1, le=1)] = 1
    checkpoint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    agreement: Annotated[float, Field(ge=0, le=1)]
    kl: Annotated[float, Field(ge=0)]
    pictures: Annotated[int, Field(ge=1)]
    calibrated_on: Annotated[int, Field(ge=1)]
    dtype: Literal["float32", "bfloat16"]
    products: Annotated[dict[Annotated[str, Field(max_length=1000)], ProductRecord], Field(max_length=10_000)]
    versions: Annotated[dict[str, Annotated[str, Field(max_length=100)]], Field(max_length=20)]

    @property
    def text(self) -> str:
        """Return the agreement as a person reads it."""
        return (
            f"float32's best class on {self.agreement:.2%} of {self.pictures} views of pictures that it was not "
            f"calibrated on (KL {self.kl:.2g})"
        )

    @property
    def quantised(self) -> dict[str, Quantised]:
        """Return how each product is computed."""
        return {name: Quantised(Way[each.way.upper()], each.low, each.high) for name, each in self.products.items()}


def write_record(
    checkpoint: Checkpoint,
    products: dict[str, Quantised],
    found: Comparison,
    *,
    pictures: int,
    calibrated_on: int,
    dtype: Literal["float32", "bfloat16"],
) -> Int8Record:
    """Write the record into the folder of its checkpoint.

    Args:
        products: of `Quantiser.quantise`.
        found: how its logits compare with float32's on so many `pictures`.
        calibrated_on, dtype: see `Int8Record`.
    """
    record = Int8Record(
        checkpoint=checkpoint_digest(checkpoint),
        agreement=found.agreement,
        kl=max(found.kl, 0.0),
        pictures=pictures,
        calibrated_on=calibrated_on,
        dtype=dtype,
        products={
            name: ProductRecord.model_validate({"way": way.name.lower(), "low": low, "high": high})
            for name, (way, low, high) in products.items()
        },
        versions={name: importlib.metadata.version(name) for name in ("openvino", "torch")},
    )
    assert checkpoint.folder is not None, "a native folder was just written"
    part = checkpoint.folder / f"{INT8_RECORD}.part"
    part.write_text(record.model_dump_json(indent=1) + "\n")
    part.replace(checkpoint.folder / INT8_RECORD)
    return record


def has_record(checkpoint: Checkpoint) -> bool:
    """Return whether `vitserve convert --dtype int8` wrote the checkpoint's folder."""
    return checkpoint.folder is not None and (checkpoint.folder / INT8_RECORD).exists()


def read_record(checkpoint: Checkpoint) -> Int8Record:
    """Return the record beside a checkpoint, once it is known to be of this checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another model or another preprocessing.
    """
    if checkpoint.folder is None:
        raise CheckpointError(f"{checkpoint.source}: no folder with {INT8_RECORD}: `vitserve convert` makes one")
    files = Folder(checkpoint.folder, checkpoint.source)
    where = files.where(INT8_RECORD)
    with validating(where):
        record = Int8Record.model_validate(files.json(INT8_RECORD))
    if record.checkpoint != checkpoint_digest(checkpoint):
        raise CheckpointError(
            f"{where}: made of another checkpoint, or for another preprocessing or image size: convert this one, or "
            "choose another dtype than int8"
        )
    return record


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Return SHA-256 of all that a network's logits come from: architecture, preprocessing and tensors."""
    digest = hashlib.sha256()
    facts = checkpoint.config.model_dump(mode="json"), checkpoint.preprocess.model_dump(mode="json")
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
