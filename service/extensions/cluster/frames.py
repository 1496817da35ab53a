"""Defines the typed frames between web workers and engine processes: msgspec structs, not pickle.

    web worker                    engine process
    ----------                    --------------
                            <--   StatusChanged(status)     first, and on each change
                            <--   Granted(lease, model)     a version for new requests
    InUse(lease, busy)      -->                             they use it from now on
                            <--   Recalled(lease)           not for new requests any more
    Returned(lease)         -->                             its last request has ended
                            <--   Alive                     heartbeat
    Call(id, request)       -->
    Cancel(id)              -->
                            <--   Answer(id) or Failed(id)  one for each call, even if cancelled

    Submit, EmbedTexts            one image, or texts, for a lease
    Change                        of the models, see `service.models.all_models`
    Put, Get                      of a kept picture

A frame is its length without these four bytes (uint32, little-endian) and a struct. The struct is a
MessagePack array that begins with its tag. An array is its shape and raw bytes; the annotation
gives its dtype. Times are intervals in seconds. Both sides run the same code on one machine, so
frames need no versions.
"""

from typing import Annotated, Any, Final, Literal, Self, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from pydantic import BaseModel

from model.images.preprocess import ModelInput, Region
from model.outputs import RequestedOutputs
from service import errors
from service.engine.messages import EngineStatus, InferenceResult, ModelInfo
from service.extensions.cluster.shared_pixels import SharedPixels
from service.web.image_stores import StoreUsage
from vitserve.documents import ListedModel

LENGTH_BYTES: Final = 4


class FrameError(Exception):
    """The peer sent bytes that are not a frame, or a frame out of order."""


# Errors of an engine; a frame carries the index of its error.
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
    """Base of all frames: a MessagePack array that begins with the class's tag."""


class Pixels(_Frame, frozen=True, tag=0):
    """The pixels of a picture.

    Attributes:
        shape: (H, W, C).
        data: their buffer in shared memory; or their bytes, a view of the received frame.
    """

    shape: tuple[int, int, int]
    data: int | memoryview

    @classmethod
    def of(cls, pixels: NDArray[np.uint8], shared: SharedPixels) -> Self:
        """Copy pixels into a buffer, if one is free."""
        high, wide, channels = pixels.shape
        return cls((high, wide, channels), shared.put(pixels))

    def array(self, shared: memoryview) -> NDArray[np.uint8]:
        """Return a view; raises `ValueError` if the number of bytes does not match the shape."""
        if isinstance(self.data, int):
            return np.ndarray(self.shape, np.uint8, shared, self.data)
        return np.frombuffer(self.data, np.uint8).reshape(self.shape)


class Submit(_Frame, frozen=True, tag=1):
    """Requests the outputs of one image, whose batch must start in `timeout` seconds from now."""

    lease: int
    pixels: Pixels
    requested: RequestedOutputs
    timeout: float


class EmbedTexts(_Frame, frozen=True, tag=2):
    """Requests the features of texts, within `timeout` seconds from now."""

    lease: int
    texts: tuple[str, ...]
    timeout: float


class Change(_Frame, frozen=True, tag=3):
    """Requests a change of the models, which `engine_server` applies.

    `load_next` loads a new model, or the next version of one that still serves. `take_over` gives
    it all new requests, and succeeds when all workers use it; `discard` closes it.

    Attributes:
        checkpoint: argument of `Models.put` for `load_next`.
        reason: reason for `discard`.
        caller: client that is charged for `load`, see `Models.load`.
    """

    act: Literal["load_next", "take_over", "discard", "load", "unload", "delete", "reload"]
    model: str = ""
    checkpoint: str | dict[str, Any] | None = None
    reason: str = ""
    caller: str = ""


class Put(_Frame, frozen=True, tag=6):
    """Requests to keep a picture for GET /attention; the result is whether it is kept."""

    pixels: Pixels
    region: Region
    image_id: str


class Get(_Frame, frozen=True, tag=7):
    """Requests a kept picture; the result is None if it is unknown, expired or evicted."""

    image_id: str


Request = Submit | EmbedTexts | Change | Put | Get


class Call(_Frame, frozen=True, tag=8):
    """Carries a request; its id is unique on the connection."""

    id: int
    request: Request


class Cancel(_Frame, frozen=True, tag=9):
    """Cancels a request."""

    id: int


class InUse(_Frame, frozen=True, tag=10):
    """Tells that a worker gives new requests to a lease, and none to earlier leases of the model.

    Attributes:
        busy: whether it has such requests, perhaps still being received.
    """

    lease: int
    busy: bool


class Returned(_Frame, frozen=True, tag=11):
    """Returns a recalled lease after the worker's last request for it."""

    lease: int


class StatusChanged(_Frame, frozen=True, tag=15):
    """Publishes the state of an engine.

    Attributes:
        kept: usage of the image store.
        models: statuses of the models, by key.
        tally: see `Models.results`.
        refused: see `Models.refused`.
    """

    status: EngineStatus
    kept: StoreUsage
    models: dict[str, ListedModel]
    tally: dict[str, int]
    refused: frozenset[str] = frozenset()


class Granted(_Frame, frozen=True, tag=12):
    """Grants a lease on a version of a model, which the engine keeps until it is returned."""

    lease: int
    model: str
    version: int
    info: ModelInfo


class Recalled(_Frame, frozen=True, tag=19):
    """Recalls a lease, which must not get new requests."""

    lease: int
    model: str


class Alive(_Frame, frozen=True, tag=20):
    """Signals that the event loop of the engine process runs."""


class Answer(_Frame, frozen=True, tag=13):
    """Carries the result of a request, see `result_of`."""

    id: int
    result: msgspec.Raw


class Reply(_Frame, frozen=True, tag=13):
    """The sent form of an `Answer`: the result is encoded with the frame, only once."""

    id: int
    result: object


class Failed(_Frame, frozen=True, tag=14):
    """Carries the error of a request.

    Attributes:
        kind: index of the error's type in `ERRORS`.
        retry_after: seconds after which to try again.
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


_FromWorker = Call | Cancel | InUse | Returned
_FromEngine = StatusChanged | Granted | Recalled | Alive | Answer | Failed
Frame = _FromWorker | _FromEngine


def _to_plain(value: Any) -> Any:
    """Return the encodable form of an array or of a pydantic model."""
    if isinstance(value, np.ndarray):
        return value.shape, np.ascontiguousarray(value).data
    assert isinstance(value, BaseModel), type(value)
    return value.model_dump()


def _from_plain(kind: Any, value: Any) -> Any:
    """Invert `_to_plain`; an array is a read-only view of its bytes."""
    if isinstance(kind, type):
        return cast(type[BaseModel], kind).model_validate(value)
    shape, data = value
    dtype = kind.__args__[1].__args__[0]  # of NDArray[dtype]; `typing.get_args` takes a microsecond
    return np.frombuffer(data, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
decoder: Final = msgspec.msgpack.Decoder(Frame, dec_hook=_from_plain)
_results: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {
    Submit: msgspec.msgpack.Decoder(InferenceResult, dec_hook=_from_plain),
    EmbedTexts: msgspec.msgpack.Decoder(NDArray[np.float32], dec_hook=_from_plain),
    Put: msgspec.msgpack.Decoder(bool),
    Get: msgspec.msgpack.Decoder(ModelInput | None, dec_hook=_from_plain),
}


def result_of(answer: Answer, request: Request) -> Any:
    """Return the decoded result of a request, None for a `Change`.

    Raises:
        FrameError: the result has a different type.
    """
    decoder = _results.get(type(request))
    if decoder is None:
        return None
    try:
        return decoder.decode(answer.result)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(f"no answer of {type(request).__name__}: {error}") from error


def encode(frame: Frame | Reply) -> bytearray:
    """Return the bytes of a frame with its length."""
    buffer = bytearray(LENGTH_BYTES)
    _encoder.encode_into(frame, buffer, LENGTH_BYTES)
    buffer[:LENGTH_BYTES] = (len(buffer) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return buffer
