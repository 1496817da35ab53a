"""Fields of a form besides the file are parameters, or they are refused."""

import base64
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from service.errors import InvalidParameter
from service.web.query import parse_query, validated
from tests.needs import needs
from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import App, app, form, service_in
from tests.service.web.http_communicator import HttpCommunicator
from tests.service.web.named_models import several


class Texts(BaseModel):
    """A query of one parameter with any number of values."""

    text: tuple[str, ...] = ()


PIECES = [
    b"%",
    b"2",
    b"0",
    b"a",
    b"\\",
    b"x",
    b"=",
    b"+",
    "ü".encode(),
    b"%C3",
    b"%BC",
    b"N{",
    b"&text=",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_a_query_is_decoded_like_urllib(pieces: list[bytes]) -> None:
    query = b"text=" + b"".join(pieces)
    try:
        expected = parse_qsl(query.decode(), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        with pytest.raises(InvalidParameter, match="not UTF-8"):
            parse_query(Texts, query)
    else:
        assert parse_query(Texts, query) == validated(Texts, expected)


def test_a_flood_of_bare_percents_is_refused() -> None:
    assert parse_query(Texts, b"text=100%") == Texts(text=("100%",))
    with pytest.raises(InvalidParameter, match="send each as %25"):
        parse_query(Texts, b"text=" + b"%" * 60_000)


async def post(service: App, path: str, query: str = "", **fields: str) -> HttpCommunicator:
    answer = await service.request("POST", path, query=query, **form(png(7), fields=fields))
    assert service_in(service).limiter.in_use == 0
    return answer


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in ("id", "timings_ms")}


@on_a_loop
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/classify", {"top_k": "1", "embedding": "true"}),
        ("/classify", {"model": "few", "min_score": "0.2"}),
        pytest.param("/invocations", {"top_k": "2"}, marks=needs("compatibility")),
        ("/embed", {"pool": "mean", "normalize": "true", "model": "few"}),
        ("/attention", {"class": "3", "format": "json"}),
    ],
)
async def test_a_field_counts_as_in_the_query(path: str, fields: dict[str, str]) -> None:
    service, _ = several()
    query = "&".join(f"{name}={value}" for name, value in fields.items())
    by_query = await post(service, path, query)
    by_form = await post(service, path, **fields)
    assert by_query.status == by_form.status == 200
    assert without_times(by_form.json) == without_times(by_query.json)
    assert without_times((await post(service, path, query, **fields)).json) == without_times(
        by_query.json
    )


@on_a_loop
@pytest.mark.parametrize("names", ["few,cats", "*"])
async def test_a_field_may_name_several_models(names: str) -> None:
    service, _ = several()
    by_query = await post(service, "/classify", f"model={names}")
    by_form = await post(service, "/classify", model=names)
    assert by_form.json["models"].keys() == by_query.json["models"].keys()
    assert (
        by_form.json["models"]["few"]["predictions"]
        == by_query.json["models"]["few"]["predictions"]
    )
    assert (await post(service, "/classify/batch", model=names)).code == "invalid_parameter"


@on_a_loop
async def test_a_field_may_complete_the_query() -> None:
    service, models = several()
    models.default_name = "bare"
    assert (await post(service, "/classify")).code == "invalid_parameter"
    assert (await post(service, "/classify", model="few")).status == 200


@on_a_loop
async def test_log_names_the_model_of_a_form(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "service.web.middleware"):
        await post(several()[0], "/classify", model="few")
    assert caplog.records[-1].__dict__["fields"]["model"] == "few"


@on_a_loop
@pytest.mark.parametrize(
    ("query", "fields", "code", "detail"),
    [
        (
            "top_k=2",
            {"top_k": "3"},
            "malformed_request",
            "top_k: '2' in the address and '3' in the form: send one",
        ),
        ("", {"topk": "3"}, "malformed_request", "unknown form field 'topk'"),
        ("", {"top_k": "x"}, "invalid_parameter", "top_k: input should be a valid integer"),
        ("", {"top_k": "0_1"}, "invalid_parameter", "top_k: '0_1' is not a number"),
        ("min_score=0_1", {}, "invalid_parameter", "min_score: '0_1' is not a number"),
        ("", {"top_k": "11"}, "invalid_parameter", "top_k 11: the model has 10 classes"),
        ("", {"model": "nobody"}, "unknown_model", "nobody"),
        ("", {"model": "few,nobody"}, "unknown_model", "nobody"),
        ("", {"model": "few,,few,nobody"}, "invalid_parameter", "''"),
    ],
)
async def test_a_field_is_refused_with_the_reason(
    query: str, fields: dict[str, str], code: str, detail: str
) -> None:
    answer = await post(several()[0], "/classify", query, **fields)
    assert answer.code == code
    assert detail in answer.json["detail"]


@on_a_loop
async def test_only_model_may_be_named_twice() -> None:
    service = app()
    name = (await service.request("GET", "/model")).json["name"]
    answer = await post(service, "/classify", f"model={name},{name}")
    assert answer.json["models"].keys() == {name}


@on_a_loop
async def test_names_are_bounded_before_any_work() -> None:
    service, _ = several()
    answer = await post(service, "/classify", "model=" + ",".join(["few"] * 4))
    assert answer.code == "invalid_parameter"
    assert "more names than the 3 models" in answer.json["detail"]
    twice = await post(service, "/classify", "model=few,few")
    assert twice.json["models"].keys() == {"few"}


@on_a_loop
async def test_a_picture_in_base64_is_answered() -> None:
    service = app()
    text = base64.b64encode(png(7))
    expected = (await service.classify(png(7))).json["predictions"]
    for body in (form(text), {"body": text}, {"body": b"data:image/png;base64," + text}):
        assert (await service.request("POST", "/classify", **body)).json["predictions"] == expected
    mixed = await service.request("POST", "/classify/batch", **form(text, b"hello", png(7)))
    first, second, third = mixed.json["results"]
    assert first["predictions"] == third["predictions"] == expected
    assert second["error"]["code"] == "unsupported_media_type"
