"""Pictures that the device decodes, through a real model: in one process, and through a channel between two."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from model.config import PreprocessConfig
from model.images.device_jpeg import MAX_BYTES, device_picture
from model.images.preprocess import preprocess
from model.prediction import EncodedPicture, MapRequest, RequestedOutputs
from model.runtime.predictor import Predictor
from service.cluster.channel import EngineChannel
from service.cluster.engine_server import EngineServer
from service.cluster.remote_engine import RemoteEngine
from service.cluster.shared_memory import SharedCounters
from service.engine.base import Engine
from service.engine.local import LocalEngine
from service.engine.messages import InferenceRequest, InferenceResult, ModelInfo, attributes
from service.errors import NotDecoded
from service.settings import load_settings
from tests.model.runtime.cuda.decoder_stand_in import PillowDecoder
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.cuda.test_picture_decoding import photograph
from tests.model.runtime.test_predictor import make_checkpoint
from tests.service.fakes import PATIENCE, on_a_loop
from tests.service.web.apps import App, until

PREPROCESS: PreprocessConfig = make_checkpoint().preprocess


def encoded(data: bytes) -> EncodedPicture:
    found = device_picture(data, PREPROCESS, max_pixels=64_000_000)
    assert found is not None
    return found.encoded


def local(decoder: PillowDecoder) -> LocalEngine:
    def load() -> tuple[Predictor, ModelInfo]:
        checkpoint = make_checkpoint()
        predictor = Predictor(
            checkpoint,
            device="cpu",
            backend="torch",
            compile_mode="off",
            max_batch=8,
            ops=StandInOps(),
            decoder=lambda _: decoder,
        )
        return predictor, ModelInfo(**attributes(ModelInfo.__dataclass_fields__, checkpoint, predictor))

    return LocalEngine(load, device="cpu", queue_size=16, max_delay=0, on_batch=lambda _: None)


@asynccontextmanager
async def in_this_process(decoder: PillowDecoder) -> AsyncIterator[LocalEngine]:
    engine = local(decoder)
    engine.start(lambda: None)
    await until(lambda: engine.ready)
    yield engine
    await engine.close()


@asynccontextmanager
async def behind_a_channel(decoder: PillowDecoder) -> AsyncIterator[Engine]:
    async with AsyncExitStack() as stack:
        counters = stack.enter_context(closing(SharedCounters(workers=1, engines=1, capacity=4)))
        channel = EngineChannel(0, "cpu", counters, slots=4, slot_bytes=MAX_BYTES)
        stack.callback(channel.close)
        server = EngineServer(local(decoder), channel, workers=1)
        await server.start()
        stack.push_async_callback(server.close)
        remote = RemoteEngine(channel, 0)
        remote.start(lambda: None)
        stack.push_async_callback(remote.close)
        await until(lambda: remote.ready)
        yield remote


WAYS = pytest.mark.parametrize("way", [in_this_process, behind_a_channel])


async def asked(engine: Engine, picture: Any, **options: Any) -> InferenceResult:
    return await engine.infer(InferenceRequest(picture, RequestedOutputs(2, **options)), timeout=PATIENCE)


@on_a_loop
@WAYS
async def test_a_picture_comes_back_as_the_model_saw_it_with_the_answer_to_just_that(way: Any) -> None:
    async with way(PillowDecoder()) as engine:
        for seed in range(6):  # more than there are slots
            data = photograph((70, 90), 6, seed)
            found = await asked(engine, encoded(data), map=MapRequest("gae"), logits=True)
            assert found.outputs.decoded is not None
            assert np.abs(found.outputs.decoded.astype(int) - preprocess(data, PREPROCESS)).max() <= 1
            again = await asked(engine, found.outputs.decoded, map=MapRequest("gae"), logits=True)
            assert again.outputs.decoded is None
            np.testing.assert_allclose(found.outputs.scores, again.outputs.scores, atol=1e-6)
            assert found.outputs.logits is not None
            assert again.outputs.logits is not None
            np.testing.assert_allclose(found.outputs.logits, again.outputs.logits, atol=1e-5)
            assert found.outputs.map is not None
            assert again.outputs.map is not None
            np.testing.assert_allclose(found.outputs.map.values, again.outputs.map.values, atol=1e-5)


@on_a_loop
@WAYS
async def test_a_picture_that_is_not_decoded_is_told_so_and_its_neighbours_are_answered(way: Any) -> None:
    decoder = PillowDecoder()
    pictures = [encoded(photograph((70, 90), seed=seed)) for seed in range(4)]
    decoder.undecodable.add(pictures[2].data)
    async with way(decoder) as engine:
        outcomes = await asyncio.gather(*(asked(engine, picture) for picture in pictures), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [InferenceResult, InferenceResult, NotDecoded, InferenceResult]


@on_a_loop
async def test_a_service_answers_as_one_that_decodes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.settings._is_installed", lambda package: True)
    decoder = PillowDecoder()
    data = photograph((200, 150), 8)
    progressive = io.BytesIO()
    Image.open(io.BytesIO(data)).save(progressive, "JPEG", progressive=True, quality=95)
    async with in_this_process(decoder) as engine:
        app = partial(App, engine=cast(Any, engine))
        cpu, device = (app(load_settings({"decode_threads": 1, "decode": where})) for where in ("cpu", "device"))
        for body in (data, progressive.getvalue(), data[:-100], b"rubbish"):
            for query in ("", "attention=true"):
                one, other = [await service.classify(body, query) for service in (cpu, device)]
                assert one.status == other.status
                if one.status != 200:
                    assert one.json["code"] == other.json["code"]
                    continue
                scores = [[each["score"] for each in answer.json["predictions"]] for answer in (one, other)]
                np.testing.assert_allclose(scores[0], scores[1], atol=0.02)
                assert one.json.get("attention", {}).get("region") == other.json.get("attention", {}).get("region")
    assert len(decoder.batches) == 2, "the device decoded the first body, twice"
