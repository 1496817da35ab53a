"""The routes that clients of other servers call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import App, app
from tests.service.web.uploads import MULTIPART, form, part


@on_a_loop
async def test_ping_says_whether_the_model_is_ready(service: App) -> None:
    answer = await service.get("/ping")
    assert (answer.status, answer.json) == (200, {"status": "Healthy"})
    service.engine.state = "loading"
    assert (await service.get("/ping")).status == 503


@on_a_loop
async def test_ping_asks_for_no_key_and_the_others_do() -> None:
    service = app(api_keys=["secret"])
    assert (await service.get("/ping")).status == 200
    for path in ("/invocations", "/predictions/fake"):
        assert (await service.classify(path=path)).status == 401


@on_a_loop
@pytest.mark.parametrize("query", ["", "top_k=2", "attention=true"])
async def test_invocations_answer_as_classify(service: App, query: str) -> None:
    answers = [(await service.classify(png(3), query, path)).json for path in ("/classify", "/invocations")]
    for answer in answers:
        for own in ("id", "timings_ms"):
            del answer[own]
        answer.get("attention", {}).pop("url", None)
    assert answers[0] == answers[1]


@on_a_loop
@pytest.mark.parametrize(("method", "version"), [("POST", ""), ("PUT", ""), ("POST", "/1"), ("PUT", "/1.0")])
async def test_predictions_are_labels_with_their_scores_the_best_first(service: App, method: str, version: str) -> None:
    expected = (await service.classify(png(3))).json["predictions"]
    answer = await service.request(method, f"/predictions/fake{version}", body=png(3))
    assert list(answer.json.items()) == [(best["label"], pytest.approx(best["score"])) for best in expected]
    assert service.metric("vit_images_total") == 2


@on_a_loop
@pytest.mark.parametrize("field", ["data", "body", "file"])
async def test_predictions_take_the_fields_of_torchserve(field: str) -> None:
    answer = await app().request(
        "POST", "/predictions/fake", headers={"content-type": MULTIPART}, body=form(part(png(3), field))
    )
    assert answer.status == 200
    assert len(answer.json) == 5


@on_a_loop
async def test_another_model_or_version_is_not_found(service: App) -> None:
    for path, code in (("/predictions/resnet", "unknown_model"), ("/predictions/fake/2", "not_found")):
        assert (await service.classify(path=path)).json["code"] == code


@on_a_loop
async def test_of_labels_that_repeat_the_best_score_stays(service: App) -> None:
    assert service.engine.info is not None
    service.engine.info = replace(service.engine.info, labels=("crane",) * 10)
    best = (await service.classify(png(3))).json["predictions"][0]
    assert (await service.classify(png(3), path="/predictions/fake")).json == {"crane": pytest.approx(best["score"])}


@on_a_loop
@pytest.mark.parametrize("path", ["google/vit", "google/vit/1", "google/vit/1.0"])
async def test_a_models_name_may_have_slashes(service: App, path: str) -> None:
    assert service.engine.info is not None
    service.engine.info = replace(service.engine.info, name="google/vit")
    assert (await service.classify(png(3), path=f"/predictions/{path}")).status == 200
    for other in ("google", "vit", "google/vit/2", "google/vit/1/1"):
        assert (await service.classify(png(3), path=f"/predictions/{other}")).status == 404
