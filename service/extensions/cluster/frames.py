"""Defines the typed frames that web workers and engine processes exchange: msgspec structs, no
pickle.

    web worker                                  engine process
    ----------                                  --------------
                                          <--   StatusChanged(status)        at once, and on each change
                                          <--   Serving(model, generation)   once it answers requests
                                          <--   Withdrawn(model, generation) when it is to answer no new ones
                                          <--   Alive                        again and again
    Uses(model, newest, oldest, busy)     -->                                new requests belong to the newest one
    Call(id, request)                     -->
    Cancel(id)                            -->
                                          <--   Answer(id) or Failed(id)     those of a batch together

    Submit, EmbedTexts                          an image, or texts, by a generation of a model
    Change                                      of the models; see `service.models.registry`
    Put, Get                                    a picture that is kept

A frame is a length (uint32, little-endian, of what follows) and a struct as a MessagePack array,
its tag first. Arrays are a shape and raw bytes; their dtypes are those of the annotations. Times
are intervals in seconds. Both sides run the same code on one machine, so there are no versions.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Final, Literal, Self, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from pydantic import BaseModel

from model.images.preprocess import ModelInput
from model.outputs import RequestedOutputs
from service import errors
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.web.image_stores import StoreUsage
from vitserve.documents import ListedModel

_LENGTH_BYTES: Final = 4

# Bytes of the longest frame: a model may have a million labels.
MAX_BYTES: Final = 256 << 20

# Bytes that are read ahead from a connection: the answers of a batch arrive together.
AHEAD_BYTES: Final = 32 << 10


class FrameError(Exception):
    """The peer sent bytes that are no frame, or a frame out of order."""


# The errors that an engine answers with; a frame carries an error's index.
ERRORS: tuple[type[errors.ServiceError], ...] = (
    errors.InferenceFailed,
    errors.EngineUnavailable,
    errors.QueueFull,
    errors.DeadlineExceeded,
    errors.CheckpointRefused,
    errors.SwapUnderWay,
    errors.ModelsFull,
    errors.UnknownModel,
    errors.NameTaken,
    errors.DefaultModel,
    errors.ModelFailed,
)


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Writes every frame as a MessagePack array that begins with its class's tag."""


class Submit(_Frame, frozen=True, tag=1):
    """Asks for one image to be computed.

    Attributes:
        shape: (H, W, C).
        data: its bytes, where they were received.
        timeout: seconds from now within which it must be launched.
    """

    model: str
    generation: int
    shape: tuple[int, int, int]
    data: memoryview
    requested: RequestedOutputs
    timeout: float

    @classmethod
    def of(cls, model: str, generation: int, image: InferenceRequest, timeout: float) -> Self:
        """Return the frame that carries an image."""
        high, wide, channels = image.pixels.shape
        data = np.ascontiguousarray(image.pixels).reshape(-1).data
        return cls(model, generation, (high, wide, channels), data, image.requested, timeout)

    @property
    def image(self) -> InferenceRequest:
        """Return the image; raises ValueError if its bytes are not as many as its shape says."""
        pixels = np.frombuffer(self.data, np.uint8).reshape(self.shape)
        return InferenceRequest(pixels, self.requested)


class EmbedTexts(_Frame, frozen=True, tag=2):
    """Asks for the features of texts, within `timeout` seconds from now."""

    model: str
    generation: int
    texts: tuple[str, ...]
    timeout: float


class Change(_Frame, frozen=True, tag=3):
    """Asks for a change of the models, which `engine_process` makes.

    `load` has a model, or another version of one, loaded beside what serves. Then `take_over` lets
    that answer new requests, and is answered when all workers use it; or `discard` closes it.
    `wake` loads a model that is unloaded.

    Attributes:
        what: of `load`, as `Models.put` has it; the reason of `discard`.
        caller: of `wake`, see `service.models.residency.load_caller`.
    """

    act: Literal["load", "take_over", "discard", "wake", "unload", "delete", "reload"]
    model: str = ""
    what: str | dict[str, Any] | None = None
    caller: str = ""


class Put(_Frame, frozen=True, tag=6):
    """Asks for a picture to be kept for GET /attention; its id, or None if it is not kept."""

    picture: ModelInput
    image_id: str | None


class Get(_Frame, frozen=True, tag=7):
    """Asks for a picture that was kept; None if it is unknown, expired or pushed out."""

    image_id: str


Request = Submit | EmbedTexts | Change | Put | Get


class Call(_Frame, frozen=True, tag=8):
    """Makes a request; its id is unique on the connection."""

    id: int
    request: Request


class Cancel(_Frame, frozen=True, tag=9):
    """Says that nobody waits for this request any more."""

    id: int


class Uses(_Frame, frozen=True, tag=10):
    """Says which generation the worker's new requests belong to, and the oldest of which it has a
    request left.

    Attributes:
        busy: whether it has requests of the newest one, some of which may only arrive.
    """

    model: str
    newest: int
    oldest: int
    busy: bool


class StatusChanged(_Frame, frozen=True, tag=11):
    """Publishes the engine's status, the kept pictures, the models by their keys, `Models.results`
    and `refused`.
    """

    status: EngineStatus
    kept: StoreUsage
    models: dict[str, ListedModel]
    tally: dict[str, int]
    refused: frozenset[str] = frozenset()


class Serving(_Frame, frozen=True, tag=12):
    """Describes a generation of a model, which answers new requests from now on."""

    model: str
    generation: int
    info: ModelInfo


class Withdrawn(_Frame, frozen=True, tag=19):
    """Says that a generation of a model is to get no new requests."""

    model: str
    generation: int


class Alive(_Frame, frozen=True, tag=20):
    """Says that the event loop of the engine's process turns."""


class Answer(_Frame, frozen=True, tag=13):
    """Answers a request with its result, see `result_of`."""

    id: int
    result: msgspec.Raw


class Reply(_Frame, frozen=True, tag=13):
    """An `Answer` as it is sent: its result is written with the frame, once."""

    id: int
    result: object


class Failed(_Frame, frozen=True, tag=14):
    """Answers a request with an error: its type's place among `ERRORS`, its message, and when to
    try again.
    """

    id: int
    kind: Annotated[int, Meta(ge=0, lt=len(ERRORS))]
    message: str
    retry_after: int | None = None

    @classmethod
    def of(cls, id_: int, error: errors.ServiceError) -> Self:
        """Return the frame that carries an error."""
        retry_after = error.retry_after if isinstance(error, errors.Unavailable) else None
        return cls(id_, ERRORS.index(type(error)), str(error), retry_after)

    def error(self) -> errors.ServiceError:
        """Return the error."""
        error = ERRORS[self.kind](self.message)
        if isinstance(error, errors.Unavailable) and self.retry_after is not None:
            error.retry_after = self.retry_after
        return error


Frame = Call | Cancel | Uses | StatusChanged | Serving | Withdrawn | Alive | Answer | Failed


def _to_plain(value: Any) -> Any:
    """Return an object that msgspec can write in place of an array or of a pydantic model."""
    if isinstance(value, np.ndarray):
        return value.shape, np.ascontiguousarray(value).data
    assert isinstance(value, BaseModel), type(value)
    return value.model_dump()


def _from_plain(kind: Any, value: Any) -> Any:
    """Return the pydantic model or the array, a read-only view of its bytes, that `_to_plain` was
    given.
    """
    if isinstance(kind, type):
        return cast(type[BaseModel], kind).model_validate(value)
    shape, data = value
    dtype = kind.__args__[1].__args__[0]  # of NDArray[dtype]; `typing.get_args` takes a microsecond
    return np.frombuffer(data, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(Frame, dec_hook=_from_plain)
_results: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {
    Submit: msgspec.msgpack.Decoder(InferenceResult, dec_hook=_from_plain),
    EmbedTexts: msgspec.msgpack.Decoder(NDArray[np.float32], dec_hook=_from_plain),
    Put: msgspec.msgpack.Decoder(str | None),
    Get: msgspec.msgpack.Decoder(ModelInput | None, dec_hook=_from_plain),
}


def answer(id_: int, result: object) -> Reply:
    """Return the answer of a request."""
    return Reply(id_, result)


def result_of(answer: Answer, request: Request) -> Any:
    """Return the result of a request, None where it has none; raises `FrameError` if it is another
    one's.
    """
    decoder = _results.get(type(request))
    try:
        return None if decoder is None else decoder.decode(answer.result)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(f"no answer of {type(request).__name__}: {error}") from error


def encode(frame: Frame | Reply) -> bytearray:
    """Return a frame's bytes, its length first."""
    buffer = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(frame, buffer, _LENGTH_BYTES)
    buffer[:_LENGTH_BYTES] = (len(buffer) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return buffer


class Connection(asyncio.BufferedProtocol):
    """One end of a connection: frames are sent, and iterated over until it ends.

    A long frame is received into memory of its own, which its pixels then lie in: a picture is
    copied once.

    Args:
        on_made: called with it once frames can be sent.

    Raises:
        FrameError: by the iteration, at what `encode` never makes.
    """

    def __init__(self, on_made: "Callable[[Connection], object]" = lambda connection: None) -> None:
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._ahead = bytearray(AHEAD_BYTES)
        self._into, self._filled = self._ahead, 0
        self._frames: deque[Frame] = deque()
        self._news = asyncio.Event()
        self._error: FrameError | None = None

    def send(self, frame: Frame | Reply) -> None:
        """Send a frame; it is lost if the peer is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(frame))

    def close(self) -> None:
        """End the connection once all is sent."""
        if self._transport is not None:
            self._transport.close()

    async def __aiter__(self) -> AsyncIterator[Frame]:
        while True:
            while self._frames:
                yield self._frames.popleft()
            if self._error is not None:
                raise self._error
            if self._transport is None:
                return
            self._news.clear()
            await self._news.wait()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a stream
        """See `asyncio.BaseProtocol`."""
        self._transport = transport
        self._on_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = None
        self._news.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return memoryview(self._into)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._filled += nbytes
        try:
            if self._into is self._ahead:
                self._cut()
            elif self._filled == len(self._into):
                self._frames.append(_decoder.decode(self._into))
                self._into, self._filled = self._ahead, 0
        except (FrameError, msgspec.MsgspecError, ValueError) as error:
            self._error, self._filled = FrameError(f"not a frame: {error}"), 0
            self.close()
        self._news.set()

    def _cut(self) -> None:
        """Take the frames out of what was read ahead; one that is longer gets memory of its own."""
        ahead, begin = memoryview(self._ahead)[: self._filled], 0
        while self._filled >= begin + _LENGTH_BYTES:
            length = int.from_bytes(ahead[begin : begin + _LENGTH_BYTES], "little")
            if length > MAX_BYTES:
                raise FrameError(f"{length} bytes, where {MAX_BYTES} are allowed")
            frame = ahead[begin + _LENGTH_BYTES : begin + _LENGTH_BYTES + length]
            if len(frame) < length and length > AHEAD_BYTES - _LENGTH_BYTES:
                self._into, self._filled = bytearray(length), len(frame)
                self._into[: len(frame)] = frame
                return
            if len(frame) < length:
                break
            self._frames.append(_decoder.decode(bytes(frame)))
            begin += _LENGTH_BYTES + length
        rest = bytes(ahead[begin:])
        self._ahead[: len(rest)] = rest
        self._filled = len(rest)
