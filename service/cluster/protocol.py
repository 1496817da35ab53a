"""Defines the typed frames that web workers and engine processes exchange: msgspec structs, no pickle.

    web worker                                   engine process
    Hello(worker, key)                  -->
                                        <--      StatusChanged(status)     on connection and on each change
                                        <--      ModelLoaded(info)         once it is loaded
    Submit(id, slot, ..., timeout)      -->                                pixels lie in the slot
    Cancel(id)                          -->
                                        <--      Completed(id, ...) or Failed(id, ...)
    EmbedTexts(id, texts, timeout)      -->
                                        <--      TextsEmbedded(id, features) or Failed(id, ...)

Every Submit gets exactly one Completed or Failed, a cancelled one too: only then may its slot be used again.

A frame is a length (uint32, little-endian, of what follows) and a struct as a MessagePack array, its tag first.
Arrays are a shape and raw bytes; their dtypes are those of the annotations. Times are intervals in seconds. Both
sides run the same code on one machine, so there are no versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from pydantic import BaseModel

from model.config import LibraryConfig, NetworkConfig, ViTConfig
from model.outputs import RequestedOutputs
from service import errors
from service.engine.messages import EngineStatus, InferenceResult, ModelInfo

_LENGTH_BYTES = 4

REQUEST_LIMIT = 1 << 10
"""Bytes of the longest frame about an image, without a map's direction, and of the longest first frame.

Any process may connect and claim to be a worker.
"""

TEXTS_LIMIT = 2 << 20
"""Bytes of the longest frame of a worker that has proved to be one: `MAX_TEXTS` texts of `MAX_CHARACTERS`.

A map's direction has 4 bytes for each of at most 16,384 values.
"""

REPLY_LIMIT = 256 << 20
"""Bytes of the longest frame that an engine sends: a model may have a million labels."""

Natural = Annotated[int, Meta(ge=0)]


class FrameError(Exception):
    """The peer sent bytes that are no frame, or a frame out of order."""


class Cancelled(errors.ServiceError):
    """Answers a Cancel that came in time; nobody waits for it."""


FAILURES: tuple[type[errors.ServiceError], ...] = (
    errors.InferenceFailed,
    errors.EngineUnavailable,
    errors.QueueFull,
    errors.DeadlineExceeded,
    Cancelled,
)
"""The errors of `Engine.infer`; a frame carries an error's index."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Writes every frame as a MessagePack array that begins with its class's tag."""


class Hello(_Frame, frozen=True, tag=1):
    """Names the worker whose part of the pixel memory is used; `key` proves that it belongs to the same service."""

    worker: Natural
    key: bytes


class Submit(_Frame, frozen=True, tag=2):
    """Asks for one image to be computed.

    Attributes:
        id: unique on its connection among those that have no outcome yet.
        slot: where its pixels lie.
        timeout: seconds from now within which it must be launched.
    """

    id: int
    slot: Natural
    timeout: float
    requested: RequestedOutputs


class Cancel(_Frame, frozen=True, tag=3):
    """Says that nobody waits for this image any more."""

    id: int


class StatusChanged(_Frame, frozen=True, tag=4):
    """Publishes the engine's status; its queue's depth stands in shared memory, where it is never old."""

    status: EngineStatus


class ModelLoaded(_Frame, frozen=True, tag=5):
    """Describes the loaded model; from now on images are taken."""

    info: ModelInfo


class Completed(_Frame, frozen=True, tag=6):
    """Answers one image."""

    id: int
    result: InferenceResult


class Failed(_Frame, frozen=True, tag=7):
    """Answers one image with an error: its type's place among `Engine.infer`'s errors, and its message."""

    id: int
    kind: Annotated[int, Meta(ge=0, lt=len(FAILURES))]
    message: str

    @classmethod
    def of(cls, id_: int, error: errors.ServiceError) -> Self:
        """Return the frame that carries an error."""
        return cls(id_, FAILURES.index(type(error)), str(error))

    def error(self) -> errors.ServiceError:
        """Return the error."""
        return FAILURES[self.kind](self.message)


class EmbedTexts(_Frame, frozen=True, tag=8):
    """Asks for the features of texts, within `timeout` seconds from now."""

    id: int
    texts: tuple[str, ...]
    timeout: float


class TextsEmbedded(_Frame, frozen=True, tag=9):
    """Answers texts with their features [N, D]."""

    id: int
    features: NDArray[np.float32]


Frame = Hello | Submit | Cancel | StatusChanged | ModelLoaded | Completed | Failed | EmbedTexts | TextsEmbedded


def _to_plain(value: Any) -> Any:
    """Return an object that msgspec can write in place of an array or of a pydantic model."""
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    assert isinstance(value, BaseModel), type(value)
    return value.model_dump()


def _from_plain(kind: Any, value: Any) -> Any:
    """Return the pydantic model or the array, a read-only view of its bytes, that `_to_plain` was given."""
    if kind is NetworkConfig:
        kind = LibraryConfig if "library" in value else ViTConfig
    if isinstance(kind, type):
        return cast(type[BaseModel], kind).model_validate(value)
    shape, data = value
    dtype = kind.__args__[1].__args__[0]  # of NDArray[dtype]; `typing.get_args` takes a microsecond
    return np.frombuffer(data, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(Frame, dec_hook=_from_plain)


def encode(frame: Frame) -> bytes:
    """Return a frame's bytes, its length first."""
    payload = _encoder.encode(frame)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


class FrameReader:
    """Cuts a stream of bytes, however it arrives, into frames; a frame above `limit` bytes is refused by its length."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with these bytes; raises `FrameError` at what `encode` never makes."""
        self._buffer += data
        start, end = 0, len(self._buffer)
        try:
            while end - start >= _LENGTH_BYTES:
                payload = start + _LENGTH_BYTES
                length = int.from_bytes(self._buffer[start:payload], "little")
                if length > self.limit:
                    raise FrameError(f"a frame of {length} bytes, where {self.limit} are allowed")
                if end < payload + length:
                    break
                start = payload + length
                try:
                    frame = _decoder.decode(self._buffer[payload:start])
                except (msgspec.MsgspecError, ValueError) as error:
                    raise FrameError(f"not a frame: {error}") from error
                yield frame
        finally:
            del self._buffer[:start]
