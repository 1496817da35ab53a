"""Request headers that demand something: each has its effect, or its refusal names the remedy."""

import base64
import hashlib
from typing import Any

import pytest

from tests.needs import needs
from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import app

PNG = png(7)
SHA = base64.b64encode(hashlib.sha256(PNG).digest()).decode()
MD5 = base64.b64encode(hashlib.md5(PNG, usedforsecurity=False).digest()).decode()
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


async def post(path: str, **headers: str) -> Any:
    path, _, query = path.partition("?")
    return await app().request("POST", path, query=query, headers=headers, body=PNG)


@on_a_loop
@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "",
        BROWSER,
        "application/*",
        "application/json;charset=utf-8",
        "text/plain, application/json;q=0.1",
        "text/html, image/gif, image/jpeg, *; q=.2",
        "application/json, application/*+json",
        "image/png;q=x, */*;q=y",
        "*/*;q=1, */*;q=nan",
        "application/json;q=-1, image/png;q=nan",
        f"image/png, {'a/b,' * 10_000}",
    ],
)
async def test_usual_accept_headers_pass(accept: str) -> None:
    assert (await post("/classify", accept=accept)).status == 200


@on_a_loop
@pytest.mark.parametrize(
    ("path", "accept", "named"),
    [
        ("/classify", "image/png", "application/json"),
        ("/classify", "text/html", "application/json"),
        ("/classify/batch", "application/xml", "application/json"),
        ("/classify", "*/*;q=0", "application/json"),
        ("/classify", "application/json;q=0, */*", "application/json"),
        ("/attention", "image/jpeg", "application/json or application/x-npy or image/png"),
        ("/attention", "application/json", "image/png; the parameter format chooses"),
        ("/embed?format=npy", "application/json", "application/x-npy; the parameter format"),
    ],
)
async def test_406_names_the_media_types(path: str, accept: str, named: str) -> None:
    answer = await post(path, accept=accept)
    assert (answer.status, answer.code) == (406, "not_acceptable")
    assert named in answer.json["detail"]


@on_a_loop
@needs("inference_protocol")
async def test_406_in_the_inference_protocol() -> None:
    answer = await app().get("/v2", accept="image/png")
    assert answer.status == 406
    assert "application/json" in answer.json["error"]


@on_a_loop
async def test_format_gives_the_accepted_type() -> None:
    answer = await post("/attention?format=json", accept="application/json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert (await post("/attention", accept="image/*")).headers["content-type"] == "image/png"


@on_a_loop
async def test_probes_ignore_accept() -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/"):
        assert (await app().get(path, accept="image/png")).status == 200


@on_a_loop
@pytest.mark.parametrize(
    ("name", "value", "status", "remedy"),
    [
        ("expect", "200-ok", 417, "100-continue"),
        ("content-range", "bytes 0-99/1000", 400, "send the whole file"),
        ("if-match", '"v1"', 412, "leave it out"),
        ("if-none-match", "*", 412, "look it up first"),
        ("x-http-method-override", "DELETE", 400, "as the method"),
        ("content-md5", "AAAAAAAAAAAAAAAAAAAAAA==", 400, "another digest"),
        ("content-md5", "not base64!", 400, "expected base64"),
        ("digest", f"SHA-256={MD5}", 400, "another digest"),
        ("content-digest", "sha-256=:AAAA:", 400, "another digest"),
        ("content-digest", "crc32c=:AAAA:", 400, "sha-256"),
        ("digest", ",".join([f"md5={MD5}"] * 5), 400, "more than 4 digests"),
        ("digest", f"md5={MD5}," * 50, 400, "more than 1000 characters"),
        ("trailer", "Content-Digest", 400, "before the body"),
    ],
)
async def test_a_demand_is_refused(name: str, value: str, status: int, remedy: str) -> None:
    answer = await post("/classify", **{name: value})
    assert answer.status == status
    assert remedy in answer.json["detail"]


@on_a_loop
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expect", "100-Continue"),
        ("if-none-match", '"v1"'),
        ("if-match", "*"),
        ("range", "bytes=0-9"),
        ("x-http-method-override", "POST"),
        ("content-md5", MD5),
        ("digest", f"SHA-256={SHA},crc32c=AAAA"),
        ("content-digest", f"sha-256=:{SHA}:"),
        ("repr-digest", f"sha-256=:{SHA}:"),
        ("want-digest", "sha-256"),
        ("via", "1.1 proxy"),
        ("forwarded", "for=192.0.2.1;proto=https"),
        ("x-forwarded-for", "192.0.2.1"),
        ("prefer", "respond-async"),
        ("te", "trailers"),
        ("trailer", "Server-Timing"),
        ("cache-control", "no-cache"),
    ],
)
async def test_other_headers_pass(name: str, value: str) -> None:
    assert (await post("/classify", **{name: value})).status == 200


@on_a_loop
async def test_if_match_does_not_create_a_model() -> None:
    answer = await app(admin_key="A").request("PUT", "/models/new", headers={"if-match": "*"})
    assert (answer.status, answer.code) == (412, "precondition_failed")
    assert "leave it out" in answer.json["detail"]


@on_a_loop
@pytest.mark.parametrize(("digest", "status"), [(SHA, 200), (MD5, 400)])
async def test_a_digest_covers_every_chunk(digest: str, status: int) -> None:
    headers = {"content-digest": f"sha-256=:{digest}:"}
    communicator = app().communicator("POST", "/classify", headers=headers, body=None)
    for byte in PNG:
        communicator.feed(bytes([byte]))
    communicator.feed(b"", more=False)
    assert (await communicator.run()).status == status


@on_a_loop
async def test_two_types_of_a_body_are_refused() -> None:
    communicator = app().communicator("POST", "/classify", body=PNG)
    types = [b"image/png", b"multipart/form-data; boundary=b"]
    communicator.scope["headers"] = [(b"content-type", value) for value in types]
    answer = await communicator.run()
    assert (answer.status, answer.code) == (400, "malformed_request")
    assert "image/png and multipart/form-data" in answer.json["detail"]
