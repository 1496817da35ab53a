"""The files of a network in int8 beside its native checkpoint: `int8.xml`, `int8.bin`, and `int8.json`.

They are data from outside, like the checkpoint. What the JSON says of the two others, and of the checkpoint that they
were made of, has to be so; and the graph has to take the images of that checkpoint and to give logits of its classes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from model.checkpoint import Checkpoint
from model.checkpoint.local_files import open_file, parse_json, resolved_part
from model.checkpoint.refusals import reading, validating
from model.errors import CheckpointError
from model.runtime.backend import INT8_RECORD
from model.runtime.batches import BatchRequest
from model.runtime.openvino.graph import core, openvino_package
from model.runtime.openvino.network import NetworkGraph

if TYPE_CHECKING:
    import openvino

_GRAPH_FILE: Final = "int8.xml"
_WEIGHTS_FILE: Final = "int8.bin"

_MAX_RECORD_BYTES: Final = 1 << 20
_MAX_GRAPH_BYTES: Final = 64 << 20
"""Of the description of the operations; ViT-L/16's takes 3 MB."""
_WEIGHTS_SLACK: Final = 16 << 20
"""Bytes that a graph's constants may take beyond those of the checkpoint's tensors."""

_FORBIDDEN: Final = frozenset({"Assign", "If", "Loop", "ReadValue", "TensorIterator"})
"""Operations that keep state, or run graphs of their own: no network is traced to them."""

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Int8Record(BaseModel):
    """`int8.json`: what the graph was made of and how often it agrees with float32.

    Attributes:
        checkpoint: `checkpoint_digest` of the checkpoint.
        graph, weights: SHA-256 of the two files.
        agreement: share of the pictures with float32's best class; none of them is of a file that it was calibrated on.
        kl: mean divergence of the softmax from float32's, in nats.
        pictures, calibrated_on: how many views of pictures.
        dtype: what stays in floating point was computed in, as the agreement was measured.
        floating: inputs of products that are quantised as they are computed, a token by itself.
        versions: of what made the graph.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal["vitserve-int8"] = "vitserve-int8"
    version: Literal[1] = 1
    checkpoint: _Digest
    graph: _Digest
    weights: _Digest
    agreement: Annotated[float, Field(ge=0, le=1)]
    kl: Annotated[float, Field(ge=-1e-6)]
    pictures: Annotated[int, Field(ge=1)]
    calibrated_on: Annotated[int, Field(ge=1)]
    dtype: Literal["float32", "bfloat16"]
    floating: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=10_000)]
    versions: Annotated[dict[str, Annotated[str, Field(max_length=100)]], Field(max_length=20)]

    @property
    def text(self) -> str:
        """Return the agreement as a person reads it."""
        return (
            f"float32's best class on {self.agreement:.2%} of {self.pictures} views of pictures that it was not "
            f"calibrated on (KL {self.kl:.2g})"
        )


def write_int8(
    folder: Path,
    checkpoint: Checkpoint,
    model: openvino.Model,
    *,
    agreement: float,
    kl: float,
    pictures: int,
    calibrated_on: int,
    dtype: Literal["float32", "bfloat16"],
    floating: tuple[str, ...],
    made_by: tuple[str, ...] = ("nncf", "openvino", "torch"),
) -> Int8Record:
    """Write a graph in int8 into the folder of its checkpoint, the record last.

    Args:
        agreement, kl, pictures, calibrated_on, dtype, floating: see `Int8Record`.
        made_by: packages whose versions are recorded.
    """
    openvino_package().save_model(model, folder / _GRAPH_FILE, compress_to_fp16=False)
    record = Int8Record(
        checkpoint=checkpoint_digest(checkpoint),
        graph=_digest_of(folder, _GRAPH_FILE, _MAX_GRAPH_BYTES),
        weights=_digest_of(folder, _WEIGHTS_FILE, _weights_limit(checkpoint)),
        agreement=agreement,
        kl=kl,
        pictures=pictures,
        calibrated_on=calibrated_on,
        dtype=dtype,
        floating=floating,
        versions={name: importlib.metadata.version(name) for name in made_by},
    )
    part = folder / f"{INT8_RECORD}.part"
    part.write_text(record.model_dump_json(indent=1) + "\n")
    part.replace(folder / INT8_RECORD)
    return record


def has_int8(checkpoint: Checkpoint) -> bool:
    """Return whether `vitserve convert --dtype int8` wrote the checkpoint's folder."""
    return checkpoint.folder is not None and (checkpoint.folder / INT8_RECORD).exists()


def read_record(checkpoint: Checkpoint) -> Int8Record:
    """Return the record beside a checkpoint, once it is known to be of this checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another model or another preprocessing.
    """
    where = f"{checkpoint.source}/{INT8_RECORD}"
    if checkpoint.folder is None:
        raise CheckpointError(f"{checkpoint.source}: no folder with {INT8_RECORD}: `vitserve convert` makes one")
    data = _bytes_of(checkpoint.folder, INT8_RECORD, _MAX_RECORD_BYTES)
    value = parse_json(data, where)
    with validating(where):
        record = Int8Record.model_validate(value)
    if record.checkpoint != checkpoint_digest(checkpoint):
        raise CheckpointError(
            f"{where}: made of another checkpoint, or for another preprocessing or image size: convert this one, or "
            "choose another dtype than int8"
        )
    return record


def read_graph(checkpoint: Checkpoint, record: Int8Record) -> NetworkGraph:
    """Return the graph beside a checkpoint.

    Raises:
        CheckpointError: a file is not the one that the record is of, or no graph of this checkpoint's images and
            classes.
    """
    assert checkpoint.folder is not None, "see `read_record`"
    where = f"{checkpoint.source}/{_GRAPH_FILE}"
    parts = (
        (_GRAPH_FILE, _MAX_GRAPH_BYTES, record.graph),
        (_WEIGHTS_FILE, _weights_limit(checkpoint), record.weights),
    )
    # Read once: what is checked is what is used, whoever changes the files meanwhile.
    xml, weights = (_checked(checkpoint, *part) for part in parts)
    from openvino import Tensor  # noqa: PLC0415  an optional package

    with reading(where, "not a graph of OpenVINO", RuntimeError, ValueError):
        model = core().read_model(xml.decode(), Tensor(np.frombuffer(weights, np.uint8)))
        problem = _problem(model, checkpoint)
    if problem is not None:
        raise CheckpointError(f"{where}: {problem}")
    return NetworkGraph(model, ("logits",), BatchRequest())


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Return SHA-256 of all that a network's logits come from: architecture, preprocessing and tensors."""
    digest = hashlib.sha256()
    facts = checkpoint.config.model_dump(mode="json"), checkpoint.preprocess.model_dump(mode="json")
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _problem(model: openvino.Model, checkpoint: Checkpoint) -> str | None:
    """Return why this is no graph of the checkpoint's logits, or None."""
    config = checkpoint.config
    rows, columns = config.image_size
    ends = [
        [f"{each.element_type.get_type_name()}{each.partial_shape}" for each in side]
        for side in (model.inputs, model.outputs)
    ]
    expected = [f"u8[?,{rows},{columns},{config.in_channels}]"], [f"f32[?,{config.num_classes}]"]
    for what, found, ours in zip(("takes", "gives"), ends, expected, strict=True):
        if found != ours:
            return f"{what} {', '.join(found):.200}, expected {ours[0]}"
    odd = {each.get_type_name() for each in model.get_ops()} & _FORBIDDEN
    return f"has {min(odd)}, which no network of vitserve has" if odd else None


def _weights_limit(checkpoint: Checkpoint) -> int:
    return _WEIGHTS_SLACK + sum(tensor.numel() * 4 for tensor in checkpoint.tensors.values())


def _checked(checkpoint: Checkpoint, name: str, limit: int, digest: str) -> bytes:
    assert checkpoint.folder is not None, "see `read_record`"
    data = _bytes_of(checkpoint.folder, name, limit)
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(f"{checkpoint.source}/{name}: damaged, or not the file that {INT8_RECORD} is of")
    return data


def _digest_of(folder: Path, name: str, limit: int) -> str:
    return hashlib.sha256(_bytes_of(folder, name, limit)).hexdigest()


def _bytes_of(folder: Path, name: str, limit: int) -> bytes:
    where = str(folder / name)
    path = resolved_part(folder, name, where)
    if path is None:
        raise CheckpointError(f"{where}: no such file")
    with open_file(path, where) as file, reading(where):
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{where}: larger than {limit} bytes")
    return data
