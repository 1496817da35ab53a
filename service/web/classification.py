"""The classification of an upload: a decode thread makes its pixels, or the device does while it computes the batch.

    VIT_DECODE=cpu      decode -> infer(pixels)
    VIT_DECODE=device   plain baseline JPEG? -> infer(JPEG) -> answer, and the pixels that the model saw
                          | no, or the device could not decode it
                          +-> decode -> infer(pixels)

What is wrong with a picture is always said by the first way, in the same words.
"""

from __future__ import annotations

import time
from functools import partial

from model.config import PreprocessConfig
from model.images.device_jpeg import DevicePicture, device_picture
from model.images.preprocess import ModelInput
from model.prediction import RequestedOutputs
from service.engine.messages import InferenceResult
from service.errors import NotDecoded, ServiceError
from service.web.decoders import Decoded
from service.web.lanes import Deadline
from service.web.pipeline import Pipeline


async def classify_upload(
    pipeline: Pipeline, data: bytearray, deadline: Deadline, requested: RequestedOutputs
) -> tuple[Decoded, InferenceResult]:
    """Decode and compute a file; return the picture as the model saw it, and the model's answer.

    Raises:
        ImageError, ServiceError: see `Pipeline.decode` and `Pipeline.infer`.
    """
    on_device = pipeline.settings.decode == "device"
    if on_device and (prepared := await _prepare(pipeline, data, deadline)) is not None:
        (encoded, region), seconds = prepared
        try:
            result = await pipeline.infer(encoded, deadline, requested)
        except NotDecoded:
            pipeline.metrics.device_decodes.labels("failed").inc()
        else:
            pipeline.metrics.device_decodes.labels("decoded").inc()
            assert result.outputs.decoded is not None, "an engine hands back what it decoded"
            return Decoded(ModelInput(result.outputs.decoded, region), seconds), result
    elif on_device:
        pipeline.metrics.device_decodes.labels("unsuited").inc()
    decoded = await pipeline.decode(data, deadline)
    result = await pipeline.infer(decoded.picture.pixels, deadline, requested)
    return decoded, result


async def _prepare(pipeline: Pipeline, data: bytearray, deadline: Deadline) -> tuple[DevicePicture, float] | None:
    """Look at a file on a decode thread; return it for the device with the seconds that took, or None."""
    remaining = deadline.remaining()
    work = partial(_timed, data, pipeline.model().preprocess, pipeline.settings.max_image_pixels)
    try:
        found, seconds = await pipeline.lanes.pictures.run(work, deadline)
    except ServiceError as error:
        pipeline.stage_failed("decode", remaining - deadline.remaining(), error)
        raise
    if found is None:
        return None
    pipeline.stage_ended("decode", seconds)
    return found, seconds


def _timed(data: bytearray, config: PreprocessConfig, max_pixels: int) -> tuple[DevicePicture | None, float]:
    started = time.perf_counter()
    found = device_picture(data, config, max_pixels=max_pixels)
    return found, time.perf_counter() - started
