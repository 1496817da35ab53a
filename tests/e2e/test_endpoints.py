"""Every endpoint, format and error of a running service, over real HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from PIL import Image

from tests.e2e.serving import CHECKPOINT_NAME, LABELS, LOG_LINE, Pictures, Serve, Served, problem
from tests.launcher import until
from tests.model.images.pictures import encode

pytestmark = pytest.mark.timeout(180)  # servers start and end

Files = list[tuple[str, tuple[str, bytes]]]


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    return serve_module(max_upload_bytes=200_000, max_image_pixels=1_000_000, max_images_per_request=8)


def files(*pictures: bytes) -> Files:
    return [("file", (f"{i}.png", picture)) for i, picture in enumerate(pictures)]


def png(width: int, height: int) -> bytes:
    return encode(Image.new("L", (width, height)), "PNG")


def test_a_picture_is_classified_in_every_form_of_body(server: Served, pictures: Pictures) -> None:
    picture = pictures.files[0]
    answers = [
        server.client.post("/classify", files=files(picture)),
        server.client.post("/classify", content=picture, headers={"Content-Type": "image/png"}),
        server.client.post("/classify", content=picture, headers={"Content-Type": "image/jpeg"}),
        server.client.post("/classify", content=picture, headers={"Content-Type": "application/octet-stream"}),
        server.client.post("/classify", content=iter([picture[:9], picture[9:]]), headers={"Content-Type": "image/x"}),
        server.client.post("/classify", content=picture, headers={"Content-Type": "application/x-www-form-urlencoded"}),
        server.client.post("/classify", content=picture),
        server.client.post("/classify", files=[("note", (None, "hello")), *files(picture)]),
    ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        document = answer.json()
        assert set(document) == {"id", "model", "predictions", "timings_ms", "batch_size"}
        assert document["model"] == CHECKPOINT_NAME
        assert len(document["predictions"]) == 5
        assert all(p["label"] == LABELS[p["index"]] for p in document["predictions"])
        pictures.check(0, document)
        assert set(document["timings_ms"]) == {"decode", "queue", "inference", "total"}
        assert document["timings_ms"]["total"] >= document["timings_ms"]["inference"] > 0
        assert document["batch_size"] == 1


@pytest.mark.parametrize(
    ("method", "path", "options", "expected"),
    [
        ("POST", "/classify", {"files": files(b"")}, (422, "invalid_image")),
        ("POST", "/classify", {}, (422, "invalid_image")),
        ("POST", "/classify", {"files": [("image", b"x")]}, (422, "invalid_image")),
        ("POST", "/classify", {"files": files(png(10, 10)[:30])}, (422, "invalid_image")),
        ("POST", "/classify", {"files": files(b"<svg></svg>")}, (415, "unsupported_media_type")),
        ("POST", "/classify", {"json": {"picture": "x"}}, (415, "unsupported_media_type")),
        ("POST", "/classify", {"data": {"file": "x"}}, (415, "unsupported_media_type")),
        ("POST", "/classify", {"files": files(png(1001, 1000))}, (413, "image_too_large")),
        ("POST", "/classify", {"files": files(bytes(200_001))}, (413, "upload_too_large")),
        ("POST", "/classify", {"files": files(b"x", b"y")}, (413, "too_many_images")),
        ("POST", "/classify/batch", {"files": files(*[b"x"] * 9)}, (413, "too_many_images")),
        ("POST", "/classify?top_k=11", {"files": files(b"x")}, (422, "invalid_parameter")),
        ("POST", "/attention?layer=2", {"files": files(b"x")}, (422, "invalid_parameter")),
        ("GET", "/attention?id=x&method=gradcam", {}, (422, "invalid_parameter")),
        ("GET", "/attention?id=x", {}, (404, "not_found")),
        ("GET", "/nope", {}, (404, "not_found")),
        ("GET", "/classify", {}, (405, "method_not_allowed")),
        (
            "POST",
            "/classify",
            {"content": b"--b\r\nbroken", "headers": {"Content-Type": "multipart/form-data; boundary=b"}},
            (400, "malformed_request"),
        ),
    ],
)
def test_errors_are_problem_documents(
    method: str, path: str, options: dict[str, Any], expected: tuple[int, str], server: Served
) -> None:
    assert problem(server.client.request(method, path, **options)) == expected


def test_the_log_is_lines_for_people(server: Served) -> None:
    assert [line for line in server.log.splitlines() if not LOG_LINE.match(line)] == []


def test_a_json_log_tells_of_each_request_and_of_no_key(serve: Serve, pictures: Pictures) -> None:
    server = serve(api_keys="alpha,beta", log_format="json", log_level="debug")
    assert problem(server.classify(pictures.files[0])) == (401, "unauthorized")
    answer = server.classify(pictures.files[0], headers={"Authorization": "Bearer beta"})
    until(lambda: server.log.endswith("\n") and server.log.count('"path": "/classify"') == 2)  # after the answers
    lines = [json.loads(line) for line in server.log.splitlines()]
    refused, answered = [line for line in lines if line.get("path") == "/classify"]
    assert (refused["status"], refused["code"], answered["status"]) == (401, "unauthorized", 200)
    assert answered["request_id"] == answer.headers["x-request-id"]
    assert answered | {"message": "request", "client": "127.0.0.1", "model": CHECKPOINT_NAME} == answered
    assert (answered["bytes_in"], answered["bytes_out"]) == (len(pictures.files[0]), len(answer.content))
    assert {"read_ms", "decode_ms", "queue_ms", "inference_ms", "duration_ms", "level", "logger"} <= answered.keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", answered["time"])
    assert not re.search("alpha|beta", server.log)


@pytest.mark.parametrize(("trusted", "client"), [(None, "127.0.0.1"), ("127.0.0.1", "203.0.113.7")])
def test_a_forwarded_address_is_believed_of_a_trusted_proxy_alone(
    trusted: str | None, client: str, serve: Serve, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    server = serve(log_format="json")
    server.classify(pictures.files[0], headers={"X-Forwarded-For": "203.0.113.7"}).raise_for_status()
    until(lambda: f'"client": "{client}"' in server.log)
