"""The route and the query of a request; the routes of operators and their tools."""

import asyncio

import pytest
from starlette.requests import Request
from starlette.responses import Response

from model.methods import methods
from service.observe.metrics import Metrics
from service.settings import load_settings
from service.web.routes.endpoint import Endpoint
from tests.needs import TEACH, needs
from tests.service.fakes import CLASSES, on_a_loop, png
from tests.service.web.apps import App, app, inside


@on_a_loop
@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/classify", "POST"),
        ("PUT", "/classify/batch", "POST"),
        ("PUT", "/attention", "GET, HEAD, POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("DELETE", "/metrics", "GET, HEAD"),
    ],
)
async def test_405_names_the_methods_of_the_path(method: str, path: str, allow: str) -> None:
    response = await app().request(method, path)
    assert (response.status, response.code) == (405, "method_not_allowed")
    assert response.headers["allow"] == allow
    assert (
        response.json["detail"]
        == f"{method} {path}: no such method on this path; there are {allow}"
    )


@on_a_loop
async def test_posting_a_model_names_the_put() -> None:
    response = await app().request("POST", "/models")
    assert (response.status, response.headers["allow"]) == (405, "GET, HEAD")
    assert response.json["detail"].endswith("; PUT /models/NAME loads a model")


def test_a_number_of_too_many_digits_is_no_path() -> None:
    async def item(request: Request) -> Response:
        raise NotImplementedError

    endpoint = Endpoint("GET", "/items/{number:int}", item)
    assert endpoint.match("/items/12") == {"number": 12}
    assert endpoint.match(f"/items/{'1' * 5000}") is None


@on_a_loop
async def test_head_is_answered_on_every_get_route() -> None:
    running = app(**TEACH)
    routes = [route for route in inside(running).routes if "GET" in route.methods]
    assert len(routes) > (20 if TEACH else 10)
    for route in routes:
        path = route.path.replace("{name}", "tiny").replace("{", "").replace("}", "")
        answers = [await running.request(method, path) for method in ("GET", "HEAD")]
        assert answers[0].status == answers[1].status, path
        assert answers[1].status != 405, path


@on_a_loop
@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/nope", None),
        ("/\n", "GET /"),
        ("/wp-login.php", None),
        ("/classify/", "POST /classify"),
        ("//classify", "POST /classify"),
        ("/Classify", "POST /classify"),
        ("/v1/classify", "POST /classify"),
        ("/api/v1/classify/batch/", "POST /classify/batch"),
        ("/predict", "POST /classify"),
        ("/embeddings", "POST /embed"),
        pytest.param("/head/dogs/examples", "GET /heads/{name}/examples", marks=needs("teach")),
        ("/model/x", "GET /model?model=x"),
        ("/classes/x", "GET /labels?model=x"),
        ("/healthz/x", "GET /healthz"),
        ("/info", "GET /model"),
        ("/healthz\n", "GET /healthz"),
        ("/health", "GET /healthz"),
        ("/swagger", "GET /docs"),
    ],
)
async def test_an_unknown_path_names_a_route(path: str, route: str | None) -> None:
    response = await app().get(path)
    assert (response.status, response.code) == (404, "not_found")
    remedy = f"did you mean {route}?" if route else "GET /docs lists all"
    assert response.json["detail"] == path.replace("\n", "\\n") + f": no such path; {remedy}"


@on_a_loop
@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/v1/models/Dogs", "POST /classify?model=Dogs"),
        ("POST", "/v1/models/dogs:predict", "POST /classify?model=dogs"),
        ("POST", "/v1/models/dogs/versions/2:classify", "POST /classify?model=dogs"),
        ("POST", "/v1/models/dogs:explain", "POST /attention?model=dogs"),
        ("POST", "/explanations/Dogs", "POST /attention?model=Dogs"),
        ("GET", "/v1/models/dogs", "GET /model?model=dogs"),
        ("GET", "/v1/models/dogs/metadata", "GET /model?model=dogs"),
    ],
)
async def test_paths_of_other_servers_keep_their_model(method: str, path: str, route: str) -> None:
    response = await app().request(method, path)
    assert (response.status, response.code) == (404, "not_found")
    assert response.json["detail"].startswith(f"{path}: no such path; did you mean {route}")


@on_a_loop
@pytest.mark.parametrize(
    ("query", "labels", "attention"),
    [
        ("", 5, False),
        ("top_k=3", 3, False),
        ("top_k=%33", 3, False),
        ("top_k=10&attention=true", 10, True),
        ("attention=on&top_k=10", 10, True),
        ("attention=False", 5, False),
        ("attention=1", 5, True),
        ("top_k=3&top_k=3", 3, False),
        ("&&top_k=2&", 2, False),
    ],
)
async def test_every_spelling_of_a_query_is_read(query: str, labels: int, attention: bool) -> None:
    document = (await app().classify(query=query)).json
    assert len(document["predictions"]) == labels
    assert ("attention" in document) == attention


@on_a_loop
@pytest.mark.parametrize("path", ["/classify", "/classify/batch"])
@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("top_k=0", "top_k: input should be greater than or equal to 1"),
        ("top_k=11", "top_k 11: the model has 10 classes"),
        ("top_k=", "top_k: input should be a valid integer, unable to parse string as an integer"),
        ("top_k=3&top_k=4", "top_k: given as '3' and as '4': send one"),
        (
            "top_k=5attention=true",
            "top_k: input should be a valid integer, unable to parse string as an integer",
        ),
        (
            "top_k=05x",
            "top_k: input should be a valid integer, unable to parse string as an integer",
        ),
        ("top_k=+", "top_k: input should be a valid integer, unable to parse string as an integer"),
        (
            "attention=yep",
            "attention: input should be a valid boolean: true or false, or 'relevance'",
        ),
        (
            "attention=true\n",
            "attention: input should be a valid boolean: true or false, or 'relevance'",
        ),
        ("attention=x&top_k=0", "top_k: input should be greater than or equal to 1"),
        (
            "topk=2",
            "unknown parameter 'topk'; "
            "available: top_k, attention, model, min_score, embedding, labels",
        ),
        (
            "top_k=2&ATENTION=true",
            "unknown parameter 'ATENTION'; "
            "available: attention, embedding, top_k, labels, min_score, model",
        ),
        (
            "top_k=2&TOP_K=3",
            "unknown parameter 'TOP_K'; "
            "available: top_k, attention, model, min_score, embedding, labels",
        ),
        (
            f"{'x' * 9000}=",
            f"unknown parameter '{'x' * 50}'; "
            "available: attention, embedding, labels, min_score, model, top_k",
        ),
        (
            "a%0Ab=1",
            "unknown parameter 'a\\nb'; "
            "available: labels, attention, embedding, min_score, model, top_k",
        ),
    ],
)
async def test_a_refused_query_names_its_parameter(path: str, query: str, detail: str) -> None:
    response = await app().classify(query=query, path=path)
    assert (response.status, response.code) == (422, "invalid_parameter")
    assert response.json["detail"] == detail


@on_a_loop
@pytest.mark.parametrize(
    ("query", "detail"),
    [
        (b"model=%C3%BC", "unknown model 'ü'"),
        (b"top_k=\xff", "percent-encoded UTF-8"),
        (b"model=%FC", "percent-encoded UTF-8"),
    ],
)
async def test_a_query_is_read_as_utf8(service: App, query: bytes, detail: str) -> None:
    communicator = service.communicator("POST", "/classify", body=png(7))
    communicator.scope["query_string"] = query
    await communicator.run()
    assert detail in communicator.json["detail"]


@on_a_loop
async def test_refused_queries_are_not_cached(service: App) -> None:
    for _ in range(2):
        assert (await service.classify(query="top_k=0")).status == 422
        assert (await service.classify(query="top_k=2")).status == 200


@on_a_loop
@pytest.mark.parametrize(("parameters", "status"), [(64, 200), (65, 422), (15_000, 422)])
async def test_the_number_of_parameters_is_bounded(parameters: int, status: int) -> None:
    query = "&".join(["top_k=1"] * parameters)
    answers = [await app().classify(query=query)]
    assert answers[0].status == status
    if status == 422:
        answers.append(await app().get("/models", query))  # it takes no parameters
        for answer in answers:
            assert answer.code == "invalid_parameter"
            assert answer.json["detail"] == "more than 64 parameters"


@on_a_loop
@pytest.mark.parametrize(
    ("path", "query", "says"),
    [
        ("/classify", "top_k=" + "9" * 4_000, "the model has 10 classes"),
        ("/attention", "method=" + "x" * 4_000, "expected one of"),
        ("/attention", "layer=-" + "9" * 4_000, "the model has layers -3 ... 2"),
        ("/" + "x" * 4_000, "", "no such path"),
    ],
)
async def test_a_refusal_quotes_little_input(path: str, query: str, says: str) -> None:
    detail = (await app().classify(path=path, query=query)).json["detail"]
    assert len(detail) <= 500
    assert says in detail


class CountedMetrics(Metrics):
    """Metrics that count how often their text is made."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = 0

    async def gather(self) -> bytes:
        self.texts += 1
        return await super().gather()


@on_a_loop
async def test_simultaneous_scrapes_share_a_text() -> None:
    metrics = CountedMetrics()
    service = App(load_settings({}), metrics=metrics)
    answers = await asyncio.gather(*(service.get("/metrics") for _ in range(8)))
    assert [answer.status for answer in answers] == [200] * 8
    assert metrics.texts == 1
    assert (await service.get("/metrics")).content != b""
    assert metrics.texts == 2


@on_a_loop
async def test_a_model_has_the_documented_fields(service: App) -> None:
    assert (await service.get("/model")).json == {
        "name": "fake",
        "source": "nowhere",
        "revision": None,
        "content": "0123456789abcdef",
        "loaded_at": "2026-01-01T00:00:00Z",
        "format": "fake",
        "architecture": "fake_vit",
        "parameters": 123,
        "input_size": [8, 8],
        "channels": 3,
        "patch_size": 4,
        "grid": [2, 2],
        "layers": 3,
        "heads": 2,
        "width": 8,
        "classes": 10,
        "pool": "cls",
        "runtime": "vitserve",
        "runtime_version": None,
        "temperature": 1.0,
        "score_form": {"power": 1.0, "crowding": 0.0},
        "multi_label": False,
        "device": "cpu",
        "dtype": "float32",
        "backend": "fake 1.0",
        "compiled": "off",
        "max_batch": 4,
        "batch_sizes": None,
        "preprocessing": {
            "size": [8, 8],
            "resize": "squash",
            "resize_size": [8, 8],
            "interpolation": "nearest",
            "crop_rounding": "half_even",
            "crop_pct": None,
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
        },
        "attention_source": "cls",
        "attention_methods": [*methods()],
        "templates": None,
        "assumed": [],
        "coverage": None,
        "calibrated_on": None,
    }


@on_a_loop
async def test_labels_are_told_in_index_order() -> None:
    assert (await app().get("/labels")).json == {
        "model": "fake",
        "labels": [f"label {i}" for i in range(CLASSES)],
    }


@on_a_loop
@pytest.mark.parametrize(
    ("state", "reason"), [("loading", "the model is loading"), ("failed", "the device failed")]
)
async def test_work_without_an_engine_is_503(service: App, state: str, reason: str) -> None:
    service.engine.state = state
    service.engine.reason = reason
    assert (await service.get("/healthz")).status == 200
    assert (await service.get("/metrics")).status == 200
    assert (await service.get("/")).status == 200
    for response in (
        await service.get("/readyz"),
        await service.classify(),
        await service.get("/model"),
    ):
        assert (response.status, response.code) == (503, "engine_unavailable")
        assert response.json["detail"] == reason
        assert int(response.headers["retry-after"]) > 0
    assert service.metric("vit_engine_up", device="cpu") == 0


@on_a_loop
async def test_a_stopping_service_is_not_ready(service: App) -> None:
    assert (await service.get("/readyz", "probe=1")).json == {"status": "ready"}
    assert (await service.get("/readyz", "model=cats")).status == 422
    service.lifecycle.stopping = True
    assert (await service.get("/healthz")).json == {"status": "ok"}
    assert (await service.get("/readyz")).status == 503
    response = await service.classify()  # load balancers need time to notice
    assert (response.status, response.headers["connection"]) == (200, "close")
    service.lifecycle.draining = True
    assert (await service.classify()).code == (await service.get("/readyz")).code == "draining"
    assert (service.lifecycle.answered, service.lifecycle.refused) == (1, 1)
