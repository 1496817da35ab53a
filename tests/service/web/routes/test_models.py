"""Models by name over HTTP: their answers, several at once, and changes with the operator's key."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from service.errors import ModelsFull
from service.models.served_heads import ServedHead
from service.models.version import Version
from tests.needs import needs
from tests.service.fakes import model_info, on_a_loop, png, until
from tests.service.web.apps import App, form, service_in, settle
from tests.service.web.fake_engine import FakeEngine
from tests.service.web.http_communicator import HttpCommunicator
from tests.service.web.named_models import several

ADMIN = {"authorization": "Bearer admin"}


async def classify(service: App, query: str, red: int = 1) -> HttpCommunicator:
    return await service.classify(png(red), query=query)


@on_a_loop
@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("POST", "/classify", "model=few&top_k=3"),
        ("POST", "/embed", "model=few"),
        ("GET", "/labels", "model=few"),
    ],
)
async def test_a_named_model_answers_every_route(method: str, path: str, query: str) -> None:
    service, _ = several()
    body = png(1) if method == "POST" else b""
    answer = await service.request(method, path, query=query, body=body)
    assert answer.status == 200
    assert b'"few"' in answer.content


@on_a_loop
async def test_a_named_model_draws_its_own_maps() -> None:
    service, _ = several()
    assert (await service.get("/model", "model=few")).json["classes"] == 3
    drawn = await service.request(
        "POST", "/attention", query="model=few&format=json&class=2", **form(png(1))
    )
    assert (drawn.json["class"], drawn.json["label"]) == (2, "few 2")
    batch = await service.request(
        "POST", "/classify/batch", query="model=few&top_k=1", **form(png(1), png(2))
    )
    assert [each["model"] for each in batch.json["results"]] == ["few", "few"]


@on_a_loop
async def test_maps_are_prepared_once() -> None:
    service, models = several()
    await service.get("/model", "model=few")
    for name in ("few", "few", "bare"):
        assert (await service.get("/model", f"model={name}&prepare_maps=true")).status == 200
        await settle()
    assert {name: len(engine.timeouts) for name, engine in models.engines.items()} == {
        "cats": 0,
        "few": 1,
        "bare": 0,
    }


@on_a_loop
@pytest.mark.parametrize("path", ["/embed", "/attention"])
@pytest.mark.parametrize("names", ["cats,few", "cats,", "*"])
async def test_several_names_are_for_classify(path: str, names: str) -> None:
    service, _ = several()
    response = await service.classify(query=f"model={names}", path=path)
    assert (response.status, response.json["code"]) == (404, "unknown_model")
    assert response.json["detail"] == (
        f"{names!r}: expected one model; POST /classify takes several; available: bare, cats, few"
    )


@on_a_loop
@pytest.mark.parametrize(
    ("names", "wrong"),
    [("*,few", "*"), ("few,*", "*"), (",few", ""), ("few,", ""), ("few,,cats", ""), (",", "")],
)
async def test_an_empty_or_starred_name_is_refused(names: str, wrong: str) -> None:
    service, _ = several()
    for answer in (
        await classify(service, f"model={names}"),
        await service.request("POST", "/classify", **form(png(1), fields={"model": names})),
    ):
        assert (answer.status, answer.code) == (422, "invalid_parameter")
        assert answer.json["detail"] == (
            f"model {names!r}: {wrong!r} is not a model's name; "
            "expected names between commas, or * alone for all models"
        )


@on_a_loop
async def test_several_models_cap_top_k_each() -> None:
    service, _ = several()
    alone = await classify(service, "model=few&top_k=4")
    assert (alone.status, alone.code) == (422, "invalid_parameter")
    assert alone.json["detail"] == "top_k 4: the model has 3 classes"
    for names in ("few,cats", "*"):
        answers = (await classify(service, f"model={names}&top_k=4")).json["models"]
        assert [len(answers[name]["predictions"]) for name in ("few", "cats")] == [3, 4], names


@on_a_loop
async def test_an_unknown_name_tells_the_others() -> None:
    service, _ = several()
    for path in ("/classify", "/embed", "/attention", "/classify/batch"):
        answer = await service.request("POST", path, query="model=nope", **form(png(1)))
        assert (answer.status, answer.code) == (404, "unknown_model")
        assert "available: bare, cats, few" in answer.json["detail"]
    for path in ("/labels", "/model"):
        assert (await service.get(path, "model=nope")).code == "unknown_model"
    assert (await classify(service, "model=cats,nope")).code == "unknown_model", (
        "it refuses the whole request"
    )


@on_a_loop
async def test_several_models_answer_one_picture() -> None:
    service, models = several()
    answer = await classify(service, "model=few,cats,bare&attention=true")
    assert answer.status == 200
    assert list(answer.json) == ["id", "models", "timings_ms"]
    of_few, of_cats, of_bare = (answer.json["models"][name] for name in ("few", "cats", "bare"))
    assert list(answer.json["models"]) == ["few", "cats", "bare"]
    assert [len(of_few["predictions"]), len(of_cats["predictions"])] == [3, 5]
    assert of_bare["error"]["code"] == "invalid_parameter"
    assert of_few["attention"]["url"].endswith("&method=cls&model=few")
    assert service.metric("vit_requests_total") == 1, "a request to three models is one"
    assert [service.metric("vit_images_total", model=name) for name in ("few", "cats", "bare")] == [
        1,
        1,
        0,
    ]
    image_id = answer.json["id"]
    for name in ("few", "cats"):
        assert (
            await service.get("/attention", f"id={image_id}&model={name}&format=json")
        ).status == 200
    models.engines["few"].error = ModelsFull("no")
    answer = await classify(service, "model=*")
    assert {name: "error" in each for name, each in answer.json["models"].items()} == {
        "bare": True, "cats": False, "few": True
    }  # fmt: skip
    assert (await classify(service, "model=cats,few&labels=a,b")).code == "invalid_parameter"
    assert (
        await service.request("POST", "/classify/batch", query="model=cats,few", **form(png(1)))
    ).status == 422
    assert (await classify(service, "model=cats,few", red=1)).status == 200
    assert (
        await service.classify(b"no picture", query="model=cats,few")
    ).code == "unsupported_media_type"


@on_a_loop
async def test_each_forward_pass_takes_one_slot() -> None:
    service, models = several(queue_size=2)
    limiter = service_in(service).limiter
    models.engines["cats"].gate.clear()
    asked = service.communicator("POST", "/classify", query="model=cats,few", body=png(1)).start()
    await until(lambda: models.engines["cats"].waiting == 1 and limiter.in_use == 1)
    assert (await classify(service, "model=cats,few")).code == "queue_full"
    models.engines["cats"].gate.set()
    await asked
    assert limiter.in_use == 0


@on_a_loop
async def test_kept_pictures_fit_one_preprocessing() -> None:
    service, _ = several()
    image_id = (await classify(service, "model=cats")).json["id"]
    assert (await service.get("/attention", f"id={image_id}&format=json")).status == 200
    assert (
        await service.get("/attention", f"id={image_id}&model=few&format=json")
    ).code == "not_found"


@on_a_loop
async def test_few_requests_wait_for_a_load() -> None:
    service, models = several(queue_size=8, request_timeout=60)
    models.engines["few"].state = "loading"
    models.engines["few"].gate.clear()
    waiting = [
        service.communicator("POST", path, query=query, body=png(1))
        for path, query in (("/classify", "model=few&top_k=1"), ("/embed", "model=few"))
    ]
    tasks = [each.start() for each in waiting]
    limiter = service_in(service).limiter
    await until(lambda: limiter.in_use == 2)
    refused = await classify(service, "model=few")
    assert (refused.status, refused.code, "retry-after" in refused.headers) == (
        503,
        "model_loading",
        True,
    )
    assert (await classify(service, "model=cats")).status == 200, "others are not delayed"
    assert (await service.get("/readyz")).status == 200
    models.engines["few"].gate.set()
    for task in tasks:
        await task
    assert [each.status for each in waiting] == [200, 200]
    assert limiter.in_use == 0


@on_a_loop
@pytest.mark.parametrize(
    "path",
    [
        "/labels?model=few",
        "/model?model=few",
        pytest.param("/v2/models/few", marks=needs("inference_protocol")),
        pytest.param("/v2/models/few/config", marks=needs("inference_protocol")),
        pytest.param("/v2/models/few/stats", marks=needs("inference_protocol")),
    ],
)
async def test_description_does_not_load_a_model(path: str) -> None:
    service, models = several()
    answers = []
    for is_unloaded in (False, True):
        if is_unloaded:
            models.give_back("few")
        answers.append((await service.get(*path.split("?"))).json)
    assert answers[0] | {"compiled": "unloaded"} == answers[1] | {"compiled": "unloaded"}
    assert models.engines["few"].state == "loading"


@on_a_loop
@pytest.mark.parametrize(
    ("path", "query", "body", "status"),
    [
        ("/classify", "model=few", b"no picture", 415),
        ("/classify", "model=few", png(1)[:50], 422),
        ("/classify", "model=few&top_k=9", png(1), 422),
        ("/classify", "model=few,cats", b"no picture", 415),
        ("/classify", "model=cats,few", png(1)[:50], 422),
        ("/classify/batch", "model=few", b"no picture", 200),
        ("/attention", "model=few&method=gradcam", png(1), 422),
        ("/attention", "model=few", b"no picture", 415),
        ("/embed", "model=few&pool=best", png(1), 422),
        pytest.param("/predictions/few", "", b"", 422, marks=needs("compatibility")),
        pytest.param(
            "/v2/models/few/infer", "", b"no request", 400, marks=needs("inference_protocol")
        ),
    ],
)
async def test_what_is_refused_loads_no_model(
    path: str, query: str, body: bytes, status: int
) -> None:
    service, models = several()
    engine = models.engines["few"]
    models.give_back("few")
    form_or_body = form(body) if path.endswith("batch") else {"body": body}
    refused = await service.request("POST", path, query=query, **form_or_body)
    assert (refused.status, engine.state) == (status, "loading")
    several_names = "model=few,cats" if path == "/classify" else "model=few"
    assert (await classify(service, several_names)).status == 200
    assert engine.state == "ready"
    assert service_in(service).limiter.in_use == 0


@on_a_loop
@pytest.mark.parametrize("own", ["ready", "ready, and deleted", "closed", "ready as another"])
async def test_an_admitted_request_keeps_its_model(
    own: str,
) -> None:
    service, models = several()
    engine = models.engines["few"]
    model = models.served["few"]
    models.give_back("few")
    engine.gate.clear()
    asked = service.communicator("POST", "/classify", query="model=few", body=png(1))
    task = asked.start()
    await until(lambda: service_in(service).limiter.in_use == 1)
    engine.state = "closed" if own == "closed" else "ready"
    other = FakeEngine(model_info(name="few", content="other"))
    models.engines["few"] = other
    engine.info = other.info if own == "ready as another" else engine.info
    model.current = Version(cast(Any, other), 2)
    if own == "ready, and deleted":
        del models.served["few"]
    engine.gate.set()
    await task
    is_own = own in ("ready", "ready, and deleted")
    assert (asked.status, len(engine.timeouts), len(other.timeouts)) == (
        200 if is_own else 503,
        is_own,
        0,
    )


@on_a_loop
async def test_a_load_is_awaited_to_the_deadline() -> None:
    service, models = several(request_timeout=0.05)
    models.engines["few"].state = "loading"
    models.engines["few"].gate.clear()
    assert (await classify(service, "model=few")).code == "model_loading"
    models.engines["few"].reason = "full"
    assert (await classify(service, "model=few")).code == "models_full"
    models.engines["cats"].state = "loading"
    assert (await classify(service, "")).code == "engine_unavailable", (
        "without the default nothing is ready"
    )


@on_a_loop
async def test_list_of_models_has_all_fields() -> None:
    service, models = several()
    models.engines["few"].state = "failed"
    models.engines["few"].reason = "no such file"
    [bare, cats, few] = (await service.get("/models")).json
    assert [each["name"] for each in (bare, cats, few)] == ["bare", "cats", "few"]
    assert cats == {
        "name": "cats",
        "state": "ready",
        "reason": "",
        "backbone": "",
        "classes": 10,
        "bytes": 0,
        "default": True,
        "taught": False,
    }
    assert (few["state"], few["reason"], few["default"]) == ("failed", "no such file", False)


@on_a_loop
async def test_loads_are_guarded(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()
    (tmp_path / "labels.txt").write_text("a")
    service, models = several(checkpoint_folder=str(tmp_path))

    async def put(name: str, body: Any, headers: dict[str, str] = ADMIN) -> HttpCommunicator:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await service.request("PUT", f"/models/{name}", headers=headers, body=content)

    for headers, status in (({}, 401), ({"authorization": "Bearer user"}, 401), (ADMIN, 204)):
        assert (await service.request("DELETE", "/models/few", headers=headers)).status == status
    for body, status, code in (
        ({"checkpoint": "../elsewhere"}, 403, "forbidden"),
        ({"checkpoint": "v2", "labels": "/etc/passwd"}, 403, "forbidden"),
        ({"checkpoint": "v2", "labels": "../x/../../etc/passwd"}, 422, None),
        ({"labels": "numbers"}, 422, "invalid_parameter"),
        ({"checkpoint": "v2", "port": 1}, 422, "invalid_parameter"),
        ({"checkpoint": 7}, 422, "invalid_parameter"),
        ({"checkpoint": "google/vit-base-patch16-224"}, 422, "checkpoint_refused"),
        (b"[]", 400, "malformed_request"),
        (b"{", 400, "malformed_request"),
        (b'{"checkpoint": "\xff"}', 400, "malformed_request"),
    ):
        answer = await put("new", body)
        assert answer.status == status or code is None, body
        assert code is None or answer.code == code
        assert "codec" not in str(answer.json)
    for name in ("x" * 300, "a%2Fb", ".."):
        assert (await put(name, {"checkpoint": "v2"})).status in (404, 422)
    models.changes.clear()
    assert (
        await put("few", {"checkpoint": "v2", "labels": "labels.txt", "image_size": "32"})
    ).status == 200
    [(_, name, what)] = models.changes
    assert name == "few"
    assert what == {
        "checkpoint": str(tmp_path.resolve() / "v2"),
        "labels": str(tmp_path.resolve() / "labels.txt"),
        "image_size": (32, 32),
        "model_name": "few",
    }


@on_a_loop
async def test_checkpoint_folder_may_be_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints/v2").mkdir(parents=True)
    service, models = several(checkpoint_folder="checkpoints")

    answer = await service.request(
        "PUT", "/models/few", headers=ADMIN, body=b'{"checkpoint": "v2"}'
    )

    assert answer.status == 200
    [(_, _, what)] = models.changes
    assert what["checkpoint"] == str(tmp_path.resolve() / "checkpoints/v2")


@on_a_loop
async def test_a_model_deleted_in_a_load_is_404() -> None:
    service, models = several(checkpoint_folder="/")
    models.gone = "few"
    answer = await service.request("PUT", "/models/few", headers=ADMIN, body=b'{"checkpoint": "."}')
    assert (answer.status, answer.code) == (404, "unknown_model")


@on_a_loop
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
@pytest.mark.parametrize(
    ("key", "status"), [("", 401), ("wrong", 401), ("user", 403), ("admin", None)]
)
async def test_only_the_admin_key_changes_models(method: str, key: str, status: int | None) -> None:
    service, models = several(api_keys="user", checkpoint_folder="/")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = b'{"checkpoint": "."}' if method == "PUT" else b""
    answer = await service.request(method, "/models/few", headers=headers, body=body)
    assert answer.status == status or (status is None and answer.status in (200, 204))
    assert len(models.changes) == (status is None)


@on_a_loop
async def test_low_scores_are_left_out() -> None:
    service, _ = several()
    scores = [each["score"] for each in (await classify(service, "top_k=4")).json["predictions"]]
    assert scores == [0.5, 0.25, 0.125, 0.0625]
    some = (await classify(service, "top_k=4&min_score=0.25")).json
    assert ([each["score"] for each in some["predictions"]], some["abstained"]) == (
        [0.5, 0.25],
        False,
    )
    none = (await classify(service, "min_score=0.9")).json
    assert (none["predictions"], none["abstained"], none["abstained_by"]) == ([], True, "min_score")
    several_models = (await classify(service, "model=cats,few&min_score=0.9")).json["models"]
    assert [each["abstained_by"] for each in several_models.values()] == ["min_score"] * 2
    assert (await classify(service, "min_score=2")).code == "invalid_parameter"


@on_a_loop
async def test_abstention_names_the_coverage(service: App) -> None:
    service.engine.info = model_info(coverage=0.9)
    answer = (await service.classify(png(10))).json
    assert (answer["abstained"], answer["abstained_by"]) == (True, "coverage")


@on_a_loop
@pytest.mark.parametrize("query", ["*", "cats,few,bare,unfitted,orphan"])
async def test_failed_model_spares_the_others(query: str) -> None:
    service, models = several()
    models.heads = {
        "unfitted": ServedHead("unfitted", None, "cats", ""),
        "orphan": ServedHead("orphan", None, None, "no model has its backbone"),
    }
    models.engines["few"].state = "unloaded"
    models.engines["few"].reason = "full"
    models.engines["bare"].state = "failed"
    models.engines["bare"].reason = "no such file"
    answer = await classify(service, f"model={query}")
    assert answer.status == 200
    found = answer.json["models"]
    assert "predictions" in found.pop("cats")
    assert {
        name: (each["error"]["code"], each["error"]["detail"]) for name, each in found.items()
    } == {
        "unfitted": ("engine_unavailable", "unfitted: it is being fitted"),
        "orphan": ("engine_unavailable", "orphan: no model has its backbone"),
        "few": ("models_full", "there is no memory"),
        "bare": ("model_failed", "bare: no such file"),
    }


@on_a_loop
async def test_a_waiting_batch_holds_one_slot() -> None:
    service, models = several(queue_size=8, request_timeout=60)
    engine = models.engines["few"]
    limiter = service_in(service).limiter
    await classify(service, "model=few")  # it has the picture then
    models.give_back("few")
    engine.gate.clear()
    asked = service.communicator(
        "POST", "/classify/batch", query="model=few", **form(*[png(1)] * 6)
    )
    task = asked.start()
    await until(
        lambda: limiter._waiting.total() == limiter.in_use == 1
    )  # the last picture is decoded then
    engine.gate.set()
    await task
    assert limiter.in_use == 0


@on_a_loop
async def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    service, models = several(checkpoint_folder=str(tmp_path))
    body = json.dumps({"checkpoint": "v2", "lables": "a"}).encode()
    answer = await service.request("PUT", "/models/few", headers=ADMIN, body=body)
    assert (answer.status, models.changes) == (422, [])
    assert "lables: unknown name: did you mean labels?" in answer.json["detail"]
