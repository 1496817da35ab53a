"""Defines the typed frames that web workers and engine processes exchange: msgspec structs, no pickle.

    web worker                                        engine process
    ----------                                        --------------
                                             <--      StatusChanged(status)           at once, and on each change
                                             <--      Serving(generation, info)       once it answers requests
    Adopted(generation)                      -->                                      new requests belong to it
    Released(generation)                     -->                                      its last request here has ended
    Submit(id, generation, pixels, ...)      -->
    Cancel(id)                               -->
                                             <--      Completed(id) or Failed(id)     answers of a batch together
    EmbedTexts(id, generation, texts, ...)   -->
                                             <--      TextsEmbedded(id) or Failed(id)
    Load(id, checkpoint)                     -->                                      it is loaded beside what serves
                                             <--      Done(id) or Failed(id)
    TakeOver(id) or Discard(id, reason)      -->
                                             <--      Done(id)                        all workers have adopted it
    Put(id, picture)                         -->
                                             <--      Kept(id)
    Get(id, image_id)                        -->
                                             <--      Found(id)

A frame is a length (uint32, little-endian, of what follows) and a struct as a MessagePack array, its tag first.
Arrays are a shape and raw bytes; their dtypes are those of the annotations. Times are intervals in seconds. Both
sides run the same code on one machine, so there are no versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Self, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from pydantic import BaseModel

from model.config import LibraryConfig, NetworkConfig, ViTConfig
from model.images.preprocess import ModelInput
from model.outputs import RequestedOutputs
from service import errors
from service.engine.messages import EngineStatus, InferenceResult, ModelInfo
from service.models.model import Loads
from service.web.image_stores import StoreUsage

_LENGTH_BYTES: Final = 4

MAX_BYTES: Final = 256 << 20
"""Bytes of the longest frame: a model may have a million labels."""

BUFFER_BYTES: Final = 1 << 20
"""Bytes that are read ahead from a connection."""


class FrameError(Exception):
    """The peer sent bytes that are no frame, or a frame out of order."""


ERRORS: tuple[type[errors.ServiceError], ...] = (
    errors.InferenceFailed,
    errors.EngineUnavailable,
    errors.QueueFull,
    errors.DeadlineExceeded,
    errors.CheckpointRefused,
    errors.SwapUnderWay,
)
"""The errors that an engine answers with; a frame carries an error's index."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Writes every frame as a MessagePack array that begins with its class's tag."""


class Adopted(_Frame, frozen=True, tag=1):
    """Says that the worker's new requests belong to this generation."""

    generation: int


class Released(_Frame, frozen=True, tag=2):
    """Says that the worker has no request of this generation, and will have none."""

    generation: int


class Submit(_Frame, frozen=True, tag=3):
    """Asks for one image to be computed.

    Attributes:
        id: unique on its connection, as of all requests.
        pixels: uint8 [H, W, C].
        timeout: seconds from now within which it must be launched.
    """

    id: int
    generation: int
    pixels: NDArray[np.uint8]
    requested: RequestedOutputs
    timeout: float


class Cancel(_Frame, frozen=True, tag=4):
    """Says that nobody waits for this request any more."""

    id: int


class EmbedTexts(_Frame, frozen=True, tag=5):
    """Asks for the features of texts, within `timeout` seconds from now."""

    id: int
    generation: int
    texts: tuple[str, ...]
    timeout: float


class Load(_Frame, frozen=True, tag=6):
    """Asks for a checkpoint to be loaded beside the one that serves; None: the configured checkpoint."""

    id: int
    checkpoint: str | None


class TakeOver(_Frame, frozen=True, tag=7):
    """Lets the checkpoint that was loaded answer new requests."""

    id: int


class Discard(_Frame, frozen=True, tag=8):
    """Closes the checkpoint that was loaded, for a reason."""

    id: int
    reason: str


class Put(_Frame, frozen=True, tag=9):
    """Asks for a picture to be kept for GET /attention."""

    id: int
    picture: ModelInput


class Get(_Frame, frozen=True, tag=10):
    """Asks for a picture that was kept."""

    id: int
    image_id: str


class StatusChanged(_Frame, frozen=True, tag=11):
    """Publishes the engine's status, the counts of loads, and the pictures that are kept."""

    status: EngineStatus
    loads: Loads
    kept: StoreUsage


class Serving(_Frame, frozen=True, tag=12):
    """Describes the model of a generation, which answers new requests from now on."""

    generation: int
    info: ModelInfo


class Completed(_Frame, frozen=True, tag=13):
    """Answers one image."""

    id: int
    value: InferenceResult


class TextsEmbedded(_Frame, frozen=True, tag=14):
    """Answers texts with their features [N, D]."""

    id: int
    value: NDArray[np.float32]


class Kept(_Frame, frozen=True, tag=15):
    """Answers a picture with its id; None: it is not kept."""

    id: int
    value: str | None


class Found(_Frame, frozen=True, tag=16):
    """Answers an id with its picture; None: it is unknown, expired or pushed out."""

    id: int
    value: ModelInput | None


class Done(_Frame, frozen=True, tag=17):
    """Answers what has no result."""

    id: int
    value: None = None


class Failed(_Frame, frozen=True, tag=18):
    """Answers any request with an error: its type's place among `ERRORS`, and its message."""

    id: int
    kind: Annotated[int, Meta(ge=0, lt=len(ERRORS))]
    message: str

    @classmethod
    def of(cls, id_: int, error: errors.ServiceError) -> Self:
        """Return the frame that carries an error."""
        return cls(id_, ERRORS.index(type(error)), str(error))

    def error(self) -> errors.ServiceError:
        """Return the error."""
        return ERRORS[self.kind](self.message)


Reply = Completed | TextsEmbedded | Kept | Found | Done
Request = Submit | EmbedTexts | Load | TakeOver | Discard | Put | Get
Frame = Adopted | Released | Cancel | StatusChanged | Serving | Failed | Request | Reply


def _to_plain(value: Any) -> Any:
    """Return an object that msgspec can write in place of an array or of a pydantic model."""
    if isinstance(value, np.ndarray):
        return value.shape, np.ascontiguousarray(value).data
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


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[Frame]:
    """Yield the frames of a connection until it ends; raises `FrameError` at what `encode` never makes."""
    try:
        while True:
            length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
            if length > MAX_BYTES:
                raise FrameError(f"a frame of {length} bytes, where {MAX_BYTES} are allowed")
            yield _decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(f"not a frame: {error}") from error
