"""What web workers and engine processes say to one another, and its bytes: typed frames, no pickle.

    web worker                                   engine process
    Hello(worker, key)                  -->
                                        <--      Status(status)            on connection and on each change
                                        <--      Model(info)               once it is loaded
    Submit(id, slot, ..., timeout)      -->                                pixels lie in the slot
    Cancel(id)                          -->
                                        <--      Result(id, ...) or Failure(id, ...)

Every Submit gets exactly one Result or Failure, a cancelled one too: only then may its slot be used again.

A frame is a length (uint32, of what follows), a kind (uint8) and a payload. What every image needs is
packed by `struct` and as raw arrays; what is rare (Status, Model) is JSON. Times are intervals in seconds.
Both sides run the same code on one machine, so numbers are little-endian and there are no versions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import TypeAdapter

from model.prediction import AttentionMap, Head, MapRequest
from service import errors
from service.engine.messages import EngineStatus, InferenceResult, ModelInfo

_HEAD = struct.Struct("<IB")

_NO_MAP = -1
_HEADS: dict[Head, int] = {"mean": -1, "max": -2}
_COMBINED: dict[int, Head] = {code: head for head, code in _HEADS.items()}


class FrameError(Exception):
    """Bytes that are no frame: the other side is not who it should be."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of a connection.

    Attributes:
        worker: whose part of the pixel memory this connection uses.
        key: proof that it comes from the same service.
    """

    kind: ClassVar[int] = 1
    worker: int
    key: bytes

    def pack(self) -> bytes:
        """The payload."""
        return struct.pack("<I", self.worker) + self.key

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """From a payload."""
        return cls(struct.unpack_from("<I", data)[0], data[4:])


@dataclass(frozen=True, slots=True)
class Submit:
    """One image for the queue.

    Attributes:
        id: unique on its connection among those that have no outcome yet.
        slot: where its pixels lie.
        top_k: how many classes to answer with.
        map: the attention map wanted beside them, if any.
        timeout: seconds from now within which it must be launched.
    """

    kind: ClassVar[int] = 2
    form: ClassVar[struct.Struct] = struct.Struct("<QIIiid")
    id: int
    slot: int
    top_k: int
    map: MapRequest | None
    timeout: float

    def pack(self) -> bytes:
        """The payload."""
        layer, head = (_NO_MAP, 0) if self.map is None else (self.map.layer, _pack_head(self.map.head))
        return self.form.pack(self.id, self.slot, self.top_k, layer, head, self.timeout)

    @classmethod
    def unpack(cls, data: bytes) -> Submit:
        """From a payload."""
        id_, slot, top_k, layer, head, timeout = cls.form.unpack(data)
        wanted = None if layer == _NO_MAP else MapRequest(layer, _unpack_head(head))
        return cls(id_, slot, top_k, wanted, timeout)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this image any more."""

    kind: ClassVar[int] = 3
    id: int

    def pack(self) -> bytes:
        """The payload."""
        return struct.pack("<Q", self.id)

    @classmethod
    def unpack(cls, data: bytes) -> Cancel:
        """From a payload."""
        return cls(*struct.unpack("<Q", data))


@dataclass(frozen=True, slots=True)
class Status:
    """How the engine is doing; its queue's depth stands in shared memory, where it is never old."""

    kind: ClassVar[int] = 4
    adapter: ClassVar[TypeAdapter[EngineStatus]] = TypeAdapter(EngineStatus)
    status: EngineStatus

    def pack(self) -> bytes:
        """The payload."""
        return self.adapter.dump_json(self.status)

    @classmethod
    def unpack(cls, data: bytes) -> Status:
        """From a payload."""
        return cls(cls.adapter.validate_json(data))


@dataclass(frozen=True, slots=True)
class Model:
    """What is loaded. From now on images are taken."""

    kind: ClassVar[int] = 5
    adapter: ClassVar[TypeAdapter[ModelInfo]] = TypeAdapter(ModelInfo)
    info: ModelInfo

    def pack(self) -> bytes:
        """The payload."""
        return self.adapter.dump_json(self.info)

    @classmethod
    def unpack(cls, data: bytes) -> Model:
        """From a payload."""
        return cls(cls.adapter.validate_json(data))


@dataclass(frozen=True, slots=True)
class Result:
    """One image's answer."""

    kind: ClassVar[int] = 6
    form: ClassVar[struct.Struct] = struct.Struct("<QIIddiidII")
    id: int
    result: InferenceResult

    def pack(self) -> bytes:
        """The payload: the numbers, then scores, indices and the map's values."""
        result, found = self.result, self.result.map
        layer, head, kept_mass, shape = _NO_MAP, 0, 0.0, (0, 0)
        if found is not None:
            layer, head, kept_mass = found.layer, _pack_head(found.head), found.kept_mass
            shape = (found.values.shape[0], found.values.shape[1])
        numbers = self.form.pack(
            self.id,
            len(result.scores),
            result.batch_size,
            result.queue_seconds,
            result.inference_seconds,
            layer,
            head,
            kept_mass,
            *shape,
        )
        arrays = [result.indices.astype("<i8", copy=False), result.scores.astype("<f4", copy=False)]
        if found is not None:
            arrays.append(found.values.astype("<f4", copy=False))
        return b"".join((numbers, *(array.tobytes() for array in arrays)))

    @classmethod
    def unpack(cls, data: bytes) -> Result:
        """From a payload; the arrays are read-only views of it."""
        id_, top_k, batch_size, queue, inference, layer, head, kept_mass, rows, columns = cls.form.unpack_from(data)
        at = cls.form.size
        indices = np.frombuffer(data, "<i8", top_k, at)
        scores = np.frombuffer(data, "<f4", top_k, at + 8 * top_k)
        found = None
        if layer != _NO_MAP:
            values = np.frombuffer(data, "<f4", rows * columns, at + 12 * top_k).reshape(rows, columns)
            found = AttentionMap(layer, _unpack_head(head), values, kept_mass)
        return cls(id_, InferenceResult(scores, indices, found, batch_size, queue, inference))


class Cancelled(errors.ServiceError):
    """The answer to a Cancel that came in time; nobody waits for it."""


_FAILURES: tuple[type[errors.ServiceError], ...] = (
    errors.InferenceFailed,
    errors.EngineUnavailable,
    errors.QueueFull,
    errors.DeadlineExceeded,
    Cancelled,
)
"""The errors of `Engine.infer`, numbered by their place here."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One image's error."""

    kind: ClassVar[int] = 7
    id: int
    error: errors.ServiceError

    def pack(self) -> bytes:
        """The payload: the error's number and its message."""
        return struct.pack("<QB", self.id, _FAILURES.index(type(self.error))) + str(self.error).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Failure:
        """From a payload."""
        id_, number = struct.unpack_from("<QB", data)
        return cls(id_, _FAILURES[number](data[9:].decode()))


Frame = Hello | Submit | Cancel | Status | Model | Result | Failure

_KINDS: dict[int, type[Frame]] = {
    frame.kind: frame for frame in (Hello, Submit, Cancel, Status, Model, Result, Failure)
}


def encode(frame: Frame) -> bytes:
    """A frame's bytes, its length first."""
    payload = frame.pack()
    return _HEAD.pack(1 + len(payload), frame.kind) + payload


class Decoder:
    """Cuts a stream of bytes, however it arrives, into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with these bytes.

        Raises:
            FrameError: this is not what `encode` makes.
        """
        self._buffer += data
        at, end = 0, len(self._buffer)
        try:
            while end - at >= _HEAD.size:
                length, kind = _HEAD.unpack_from(self._buffer, at)
                after = at + 4 + length
                if end < after:
                    break
                payload = bytes(self._buffer[at + _HEAD.size : after])
                at = after
                try:
                    frame = _KINDS[kind].unpack(payload)
                except (struct.error, LookupError, ValueError) as error:
                    raise FrameError(f"not a frame: {type(error).__name__}: {error}") from error
                yield frame
        finally:
            del self._buffer[:at]


def _pack_head(head: Head) -> int:
    return head if isinstance(head, int) else _HEADS[head]


def _unpack_head(code: int) -> Head:
    return code if code >= 0 else _COMBINED[code]
