"""VIT_DECODE=device on the web side: which pictures the engine gets as bytes, and what becomes of those it refuses."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model.prediction import EncodedPicture
from service.engine.messages import InferenceRequest, InferenceResult
from service.errors import InferenceFailed, NotDecoded, SettingsError
from service.settings import load_settings
from tests.service.fakes import SIZE, on_a_loop, png
from tests.service.web.apps import App, form
from tests.service.web.fake_engine import FakeEngine

RED = 40
DECODED = np.full((SIZE, SIZE, 3), (RED, 1, 2), np.uint8)
"""What the engine's device makes of every picture."""


class DecodingEngine(FakeEngine):
    """Answers a picture in bytes as `DECODED`, unless it is to refuse it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[type] = []
        self.refuses: Exception | None = None

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        self.asked.append(type(request.pixels))
        if not isinstance(request.pixels, EncodedPicture):
            return await super().infer(request, timeout=timeout)
        if self.refuses is not None:
            raise self.refuses
        result = await super().infer(replace(request, pixels=DECODED), timeout=timeout)
        return replace(result, outputs=replace(result.outputs, decoded=DECODED))


def jpeg(red: int = 90, size: tuple[int, int] = (24, 16), **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (red, 0, 0)).save(file, "JPEG", **options)
    return file.getvalue()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.settings._is_installed", lambda package: True)


def started() -> tuple[App, DecodingEngine]:
    engine = DecodingEngine()
    return App(load_settings({"decode_threads": 1, "decode": "device"}), engine), engine


def counted(service: App) -> dict[str, float]:
    outcomes = ("decoded", "unsuited", "failed")
    found = {outcome: service.metric("vit_device_decodes_total", outcome=outcome) for outcome in outcomes}
    return {outcome: count for outcome, count in found.items() if count}


@on_a_loop
async def test_a_baseline_jpeg_is_decoded_by_the_engine_and_kept_as_the_model_saw_it() -> None:
    service, engine = started()
    answer = await service.classify(jpeg(), query="attention=true")
    assert answer.status == 200
    assert engine.asked == [EncodedPicture]
    assert answer.json["predictions"][0]["index"] == RED % 10
    assert answer.json["attention"]["region"] == {"x": 0, "y": 0, "width": 24, "height": 16}
    assert answer.json["timings_ms"]["decode"] >= 0
    assert counted(service) == {"decoded": 1}
    map_of_it = await service.get("/attention", f"id={answer.json['id']}&format=json")
    assert map_of_it.json["class"] == RED % 10, "the kept pixels are the device's"
    assert engine.asked == [EncodedPicture, np.ndarray]


@on_a_loop
@pytest.mark.parametrize("body", [png(7), jpeg(7, progressive=True)], ids=["PNG", "progressive"])
async def test_any_other_picture_goes_the_cpus_way(body: bytes) -> None:
    service, engine = started()
    assert (await service.classify(body)).status == 200
    assert engine.asked == [np.ndarray]
    assert counted(service) == {"unsuited": 1}


@on_a_loop
async def test_what_the_device_cannot_decode_is_decoded_by_the_cpu_and_sent_again() -> None:
    service, engine = started()
    engine.refuses = NotDecoded("no")
    answer = await service.classify(jpeg(90))
    assert answer.status == 200
    assert engine.asked == [EncodedPicture, np.ndarray]
    assert abs(answer.json["predictions"][0]["index"] - 90 % 10) <= 1  # a JPEG's red is a level off
    assert counted(service) == {"failed": 1}


@on_a_loop
async def test_neighbours_in_a_batch_notice_nothing_and_what_is_corrupt_is_answered_as_by_the_cpu() -> None:
    service, engine = started()
    good, bad = jpeg(90), jpeg(90, quality=100)[:-60]
    plain = App(load_settings({"decode_threads": 1}))
    answers = [await one.request("POST", "/classify/batch", **form(good, bad, b"", png(3))) for one in (service, plain)]
    results, expected = (answer.json["results"] for answer in answers)
    assert "predictions" in results[0]
    for place in (1, 2, 3):
        for document in (results[place], expected[place]):
            document.pop("timings_ms", None)
            document.pop("id", None)
            document.get("error", {}).pop("request_id", None)
        assert results[place] == expected[place]
    assert results[1]["error"]["status"] == 422
    assert counted(service) == {"decoded": 1, "unsuited": 3}
    assert len(engine.asked) == 2


@on_a_loop
async def test_other_errors_of_the_engine_are_answered_and_nothing_is_sent_again() -> None:
    service, engine = started()
    engine.refuses = InferenceFailed("no answer")
    assert (await service.classify(jpeg())).status == 500
    assert engine.asked == [EncodedPicture]


@on_a_loop
async def test_maps_of_an_upload_are_decoded_by_the_cpu() -> None:
    service, engine = started()
    assert (await service.classify(jpeg(), path="/attention", query="format=json")).status == 200
    assert engine.asked == [np.ndarray]
    assert counted(service) == {}


@on_a_loop
async def test_the_open_inference_protocol_takes_the_same_way() -> None:
    service, engine = started()
    data = jpeg()
    header = b'{"inputs":[{"name":"image","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":%d}}]}' % (
        len(data) + 4
    )
    body = header + len(data).to_bytes(4, "little") + data
    headers = {"inference-header-content-length": str(len(header)), "content-type": "application/octet-stream"}
    answer = await service.request("POST", "/v2/models/fake/infer", headers=headers, body=body)
    assert answer.status == 200
    assert engine.asked == [EncodedPicture]


@on_a_loop
async def test_without_the_setting_nothing_is_sent_as_bytes_or_counted() -> None:
    engine = DecodingEngine()
    service = App(load_settings({"decode_threads": 1}), engine)
    assert (await service.classify(jpeg())).status == 200
    assert engine.asked == [np.ndarray]
    assert counted(service) == {}


def test_the_setting_is_refused_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.settings._is_installed", lambda package: False)
    with pytest.raises(SettingsError, match=r"^VIT_DECODE='device': it needs nvImageCodec: pip install") as refused:
        load_settings({"decode": "device"})
    assert "\n" not in str(refused.value)
