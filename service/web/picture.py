"""One picture's way through the service: a file is decoded, inferred, and scored.

    decode_file    bytes -> uint8 [H, W, C] of the model's size, on a thread or in a process
    infer          the engine answers, or gives the features that a head outside it reads
    answer         that head scores the features: a served head, or one of the request's labels

Each function takes the admitted request, whose model answers. Everything scarce is a lane of
`service.web.lanes`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from model.config import PreprocessConfig
from model.heads import Head
from model.images.decode import is_bounded
from model.images.formats import is_picture
from model.images.preprocess import ModelInput, Region, model_input
from model.outputs import Outputs, RequestedOutputs
from service.engine.messages import InferenceRequest, InferenceResult
from service.errors import (
    InferenceFailed,
    MissingImage,
)
from service.models.residency import UNNAMED
from service.models.version import Lease
from service.settings import Settings
from service.web.admit import AdmittedRequest, deadline_of, waiting_for_model
from service.web.base64_pictures import BYTES_A_VALUE, is_text, picture_of_text
from service.web.decoders import Decoded
from service.web.image_stores import new_image_id, store_key
from service.web.lanes import Job
from service.web.service import Service

logger = logging.getLogger("vitserve")

T = TypeVar("T")

# Multiplications from which a thread scores heads; handing them over costs the event loop 0.1 ms.
_LARGE_SCORES: Final = 1 << 18


async def infer_file(
    admitted: AdmittedRequest, data: bytearray, requested: RequestedOutputs
) -> tuple[Decoded, InferenceResult]:
    """Return the decoded picture of a file, and the model's answer to it.

    A picture keeps its turn in the lane until it is answered, so that decoding does not run far
    ahead of the model. It gives up its turn before it waits for a model to load or for a map. Its
    slot is free once the picture is answered or refused, although others of its batch are not.

    Raises as `decode_file` and `infer_pixels`.
    """
    is_loaded = admitted.model.is_loaded
    head: Head | None = None
    try:
        if is_loaded:  # texts come first, because they are scarcer than passes
            head = await _find_head(admitted, requested)
        decoded, turn = await decode_file(admitted, data)
        pixels = decoded.picture.pixels
        if not is_loaded or requested.map is not None:
            turn.leave()
            return decoded, await infer_pixels(admitted, pixels, requested, head)
        with turn:
            result = await _infer(admitted, pixels, for_engine(requested, head))
        return decoded, await _answer(admitted, head, requested, result)
    finally:
        admitted.permit.release()


async def infer_pixels(
    admitted: AdmittedRequest,
    pixels: NDArray[np.uint8],
    requested: RequestedOutputs,
    head: Head | None = None,
) -> InferenceResult:
    """Return the model's answer to one picture, uint8 [H, W, C], in a turn of its own.

    Args:
        head: the head that scores the features, if it is known already.

    Raises as `load_model` and `Engine.infer`.
    """
    await load_model(admitted)
    if head is None:
        head = await _find_head(admitted, requested)
    of_engine = for_engine(requested, head)
    lanes = admitted.service.lanes
    if of_engine.needs_pass:  # a map that needs a pass of its own
        async with admitted.turn(lanes.explanations):
            result = await _infer(admitted, pixels, of_engine)
    else:
        caller = admitted.sender.caller
        with lanes.pictures.turn(caller, pixels.nbytes, admitted.deadline) as turn:
            await turn
            result = await _infer(admitted, pixels, of_engine)
    return await _answer(admitted, head, requested, result)


# Decode


async def decode_file(admitted: AdmittedRequest, data: bytearray) -> tuple[Decoded, Job[Any]]:
    """Return the picture of a file at the model's size, and the job that holds its turn.

    The caller must leave that job.

    A thread decodes a file if its header bounds the work, else a process does. A picture from a
    process then waits for a turn in the lane of the threads. There, the bytes of the decoded
    picture count as the size of a file. The process stays taken until that turn
    begins: otherwise processes would decode far ahead of the model.

    Raises:
        MissingImage: the file is empty.
        QueueFull: the picture cannot be decoded in time.
        What `picture_of_text` and `Decoders.model_input` raise.
    """
    service = admitted.service
    config = admitted.model.info.preprocess
    if not data:
        raise MissingImage("the picture is empty")
    if not is_picture(data) and is_text(data):
        limit = service.settings.max_upload_bytes
        read = partial(picture_of_text, data, limit, admitted.right_call)
        data = await admitted.convert(read, size=len(data) // BYTES_A_VALUE)
    caller = admitted.sender.caller
    if is_bounded(data):
        work = partial(_decode, data, config, service.settings)
        job: Job[Any] = service.lanes.pictures.work(work, caller, len(data), admitted.deadline)
        with admitted.permit.lent(keep=1):  # a batch does not keep other callers out
            decoded = await _holding_turn(job)
    else:
        async with admitted.turn(service.lanes.decoders):
            decoded = await service.decoders.model_input(data, config, admitted.deadline)
            size = decoded.picture.pixels.nbytes
            job = service.lanes.pictures.turn(caller, size, admitted.deadline)
            await _holding_turn(job)
    service.metrics.observe_stage("decode", decoded.seconds)
    return decoded, job


async def decode_photo(
    admitted: AdmittedRequest, data: bytearray, region: Region, size: int | None
) -> ModelInput:
    """Return the whole photo of a file, and the region that the model saw.

    Args:
        size: longest side of the photo in pixels.
    """
    async with admitted.turn(admitted.service.lanes.decoders):
        photo = await admitted.service.decoders.photo(data, region, size, admitted.deadline)
    return photo.picture


def _decode(data: bytearray, config: PreprocessConfig, settings: Settings) -> Decoded:
    started = time.perf_counter()
    picture = model_input(
        data, config, max_pixels=settings.max_image_pixels, scaled_decode=settings.scaled_decode
    )
    return Decoded(picture, time.perf_counter() - started)


async def _holding_turn(job: Job[T]) -> T:
    """Return the result of a job, which then keeps its turn; a failed job leaves its turn."""
    try:
        return await job
    except BaseException:
        job.leave()
        raise


# Load the model


async def load_model(admitted: AdmittedRequest, *, share: float = 1.0) -> None:
    """Load the request's model if it is unloaded; the pictures of a batch load it once.

    Args:
        share: part of the request's time that loading may take.

    Raises:
        What `waiting_for_model` and `Lease.load` raise.
    """
    model = admitted.model
    if model.is_loaded:
        return
    with admitted.permit.lent():
        async with admitted.loading:
            if not model.is_loaded:
                service = admitted.service
                deadline = deadline_of(service, admitted.sender.started, share)
                caller = admitted.sender.caller or UNNAMED
                async with waiting_for_model(service, model.info.name, deadline, caller):
                    await model.load(service.models, caller)


# Infer


def for_engine(requested: RequestedOutputs, head: Head | None) -> RequestedOutputs:
    """Return the outputs that the engine computes: features, if a head outside it scores."""
    return requested if head is None else head.backbone_request(requested)


async def _infer(
    admitted: AdmittedRequest, pixels: NDArray[np.uint8], requested: RequestedOutputs
) -> InferenceResult:
    """Return the engine's answer to one picture, from a batch with others."""
    model = admitted.model
    if model.info.head and not requested.head_name:
        requested = replace(requested, head_name=model.info.head)
    request = InferenceRequest(pixels, requested)
    result = await model.engine.infer(request, timeout=admitted.deadline.remaining())
    metrics = admitted.service.metrics
    metrics.observe_stage("queue", result.queue_seconds)
    metrics.observe_stage("inference", result.inference_seconds, result.batch_size)
    return result


# Score by a head outside the engine


async def _find_head(admitted: AdmittedRequest, requested: RequestedOutputs) -> Head | None:
    """Return the served head, or a head of the request's labels; None if the engine scores."""
    if admitted.model.head is not None:
        return admitted.model.head
    if not requested.labels:
        return None
    zero_shot = admitted.model.info.zero_shot
    assert zero_shot is not None, "routes refuse labels for other models"
    texts = await embed_texts(admitted, zero_shot.prompts(requested.labels))
    make_head = partial(zero_shot.head, requested.labels, texts)
    return await compute(admitted, make_head, cost=texts.size)


async def _answer(
    admitted: AdmittedRequest,
    head: Head | None,
    requested: RequestedOutputs,
    result: InferenceResult,
) -> InferenceResult:
    """Return the answer of a head to the features of a picture; without a head, the engine's."""
    if head is None:
        return result
    work = partial(answer_by_head, head, requested, result.outputs)
    return result._replace(outputs=await compute(admitted, work, cost=head.multiplications))


def answer_by_head(head: Head, requested: RequestedOutputs, of_backbone: Outputs) -> Outputs:
    """Return `Head.answer`; raises `InferenceFailed` if a score is not finite."""
    answer = head.answer(requested, of_backbone)
    if not answer.finite:
        raise InferenceFailed("the head gave no finite score for this image")
    return answer


async def compute(admitted: AdmittedRequest, work: Callable[[], T], *, cost: int) -> T:
    """Return the result of `work`, from a thread if it takes many multiplications."""
    if cost < _LARGE_SCORES:
        return work()
    return await admitted.on_thread(admitted.service.lanes.scores, work, cost)


async def embed_texts(admitted: AdmittedRequest, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return the features of texts, in a turn if some of the texts are new.

    Raises as `load_model` and `Engine.embed_texts`.
    """
    await load_model(admitted)
    engine = admitted.model.engine
    service = admitted.service
    with admitted.permit.lent():
        async with admitted.embedding:  # the pictures of a batch ask for the same texts
            count = service.texts.count_new(engine, texts)
            if not count:
                return await engine.embed_texts(texts, timeout=admitted.deadline.remaining())
            with service.lanes.texts.turn(admitted.sender.caller, count, admitted.deadline) as turn:
                await turn
                features = await engine.embed_texts(texts, timeout=admitted.deadline.remaining())
            service.texts.add(engine, texts)
            return features


# Keep


async def keep(
    admitted: AdmittedRequest, picture: ModelInput, image_id: str | None = None
) -> str | None:
    """Store a picture as the model sees it, and return its id, or None if it is not stored.

    Models with different preprocessing store a picture each under the same id.
    """
    image_id = image_id or new_image_id()
    key = store_key(image_id, admitted.model.info.preprocess)
    try:
        is_stored = await admitted.service.images.put(picture, key)
    except Exception:  # any error of a store costs the answer only its id
        logger.exception("the picture is not kept")
        return None
    return image_id if is_stored else None


async def kept_picture(service: Service, image_id: str, model: Lease) -> ModelInput | None:
    """Return the stored picture of an id as a model sees it, or None if it is not stored."""
    picture = await service.images.get(store_key(image_id, model.info.preprocess))
    # Another replica may have stored anything under this id.
    if picture is None or picture.pixels.shape != model.info.input_shape:
        return None
    return picture
