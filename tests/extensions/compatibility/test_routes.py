"""The routes of TorchServe and of SageMaker's containers."""

from dataclasses import replace

import numpy as np
import pytest

from tests.service.fakes import model_info, on_a_loop, png
from tests.service.web.apps import App, app
from tests.service.web.named_models import FEW, several
from tests.service.web.uploads import MULTIPART, form, part


@on_a_loop
async def test_ping_is_200_only_when_ready(service: App) -> None:
    answer = await service.get("/ping")
    assert (answer.status, answer.json) == (200, {"status": "Healthy"})
    service.engine.state = "loading"
    assert (await service.get("/ping")).status == 503


@on_a_loop
async def test_ping_of_a_stopping_service_is_503(service: App) -> None:
    service.lifecycle.stopping = True
    assert (await service.get("/ping")).status == 503


@on_a_loop
async def test_only_ping_needs_no_key() -> None:
    service = app(api_keys=["secret"])
    assert (await service.get("/ping")).status == 200
    for path in ("/invocations", "/predictions/fake"):
        assert (await service.classify(path=path)).status == 401


@on_a_loop
@pytest.mark.parametrize("query", ["", "top_k=2", "attention=true"])
async def test_invocations_answer_like_classify(service: App, query: str) -> None:
    answers = [
        (await service.classify(png(3), query, path)).json for path in ("/classify", "/invocations")
    ]
    for each in answers:
        for own in ("id", "timings_ms"):
            del each[own]
        each.get("attention", {}).pop("url", None)
    assert answers[0] == answers[1]


@on_a_loop
async def test_a_target_model_is_refused(service: App) -> None:
    headers = {"content-type": "image/png", "x-amzn-sagemaker-target-model": "dogs.tar.gz"}
    answer = await service.request("POST", "/invocations", headers=headers, body=png(3))
    assert (answer.status, answer.code) == (422, "invalid_parameter")
    assert "?model=NAME" in answer.json["detail"]


@on_a_loop
@pytest.mark.parametrize(
    ("method", "version"), [("POST", ""), ("PUT", ""), ("POST", "/1"), ("PUT", "/1.0")]
)
async def test_predictions_are_scores_by_label(service: App, method: str, version: str) -> None:
    expected = (await service.classify(png(3))).json["predictions"]
    answer = await service.request(method, f"/predictions/fake{version}", body=png(3))
    assert list(answer.json.items()) == [
        (best["label"], pytest.approx(best["score"])) for best in expected
    ]
    assert service.metric("vit_images_total") == 2


@on_a_loop
@pytest.mark.parametrize("field", ["data", "body", "file"])
async def test_form_fields_of_torchserve_are_read(field: str) -> None:
    answer = await app().request(
        "POST",
        "/predictions/fake",
        headers={"content-type": MULTIPART},
        body=form(part(png(3), field)),
    )
    assert answer.status == 200
    assert len(answer.json) == 5


@on_a_loop
async def test_unknown_names_are_refused(service: App) -> None:
    for path, code in (
        ("/predictions/resnet", "unknown_model"),
        ("/predictions/fake/2", "not_found"),
    ):
        assert (await service.classify(path=path)).json["code"] == code


@on_a_loop
async def test_equal_labels_keep_the_best_score(service: App) -> None:
    assert service.engine.info is not None
    service.engine.info = replace(service.engine.info, labels=("crane",) * 10)
    best = (await service.classify(png(3))).json["predictions"][0]
    assert (await service.classify(png(3), path="/predictions/fake")).json == {
        "crane": pytest.approx(best["score"])
    }


@on_a_loop
@pytest.mark.parametrize("path", ["google/vit", "google/vit/1", "google/vit/1.0"])
async def test_model_names_may_have_slashes(service: App, path: str) -> None:
    assert service.engine.info is not None
    service.engine.info = replace(service.engine.info, name="google/vit")
    assert (await service.classify(png(3), path=f"/predictions/{path}")).status == 200
    for other in ("google", "vit", "google/vit/2", "google/vit/1/1"):
        assert (await service.classify(png(3), path=f"/predictions/{other}")).status == 404


@on_a_loop
@pytest.mark.parametrize(
    ("red", "labels"), [(3, ["label 3", "label 4", "label 5"]), (0, [])], ids=["set", "empty set"]
)
async def test_predictions_are_those_in_the_set(red: int, labels: list[str]) -> None:
    service = app()
    service.engine.info = model_info(coverage=0.95, calibrated_on=50)
    answer = await service.classify(png(red), path="/predictions/fake")
    assert list(answer.json) == labels
    assert service.metric("vit_abstained_total") == (red == 0)


@on_a_loop
async def test_predictions_reach_their_thresholds() -> None:
    service = app()
    service.engine.info = model_info(has_thresholds=True)
    service.engine.thresholds = np.zeros(10, np.float32)
    service.engine.thresholds[3] = 0.6  # above the best score, 0.5
    answer = await service.classify(png(3), path="/predictions/fake")
    assert next(iter(answer.json)) == "label 4"
    service.engine.thresholds[:] = 0.6
    assert (await service.classify(png(3), path="/predictions/fake")).json == {}


@on_a_loop
@pytest.mark.parametrize("path", ["/predictions/fake", "/invocations"])
async def test_a_json_document_is_no_picture(path: str) -> None:
    answer = await app().request(
        "POST", path, headers={"content-type": "application/json"}, body=b"no picture"
    )
    assert answer.status == 415
    assert "parameters go into the URL" in answer.json["detail"]


@on_a_loop
async def test_torchserve_path_names_the_model() -> None:
    service, _ = several()
    predictions = await service.classify(png(1), path="/predictions/few")
    assert set(predictions.json) <= set(FEW)
