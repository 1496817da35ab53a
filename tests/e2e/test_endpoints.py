"""All endpoints, formats and errors of a running service over HTTP, and clients of its OpenAPI."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.serving import CHECKPOINT_NAME, LABELS, LOG_LINE, Pictures, Serve, Served, problem
from tests.fuzz.openapi import schemathesis
from tests.launcher import PATIENCE, until
from tests.model.images.pictures import encode

pytestmark = pytest.mark.timeout(240)  # a server and a generator start

Files = list[tuple[str, tuple[str, bytes]]]


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    return serve_module(
        max_upload_bytes=200_000, max_image_pixels=1_000_000, max_images_per_request=8
    )


def files(*pictures: bytes) -> Files:
    return [("file", (f"{i}.png", picture)) for i, picture in enumerate(pictures)]


def png(width: int, height: int) -> bytes:
    return encode(Image.new("L", (width, height)), "PNG")


def test_every_form_of_body_is_classified(server: Served, pictures: Pictures) -> None:
    picture = pictures.files[0]
    answers = [
        server.client.post("/classify", files=files(picture)),
        server.client.post("/classify", content=picture, headers={"Content-Type": "image/png"}),
        server.client.post("/classify", content=picture, headers={"Content-Type": "image/jpeg"}),
        server.client.post(
            "/classify", content=picture, headers={"Content-Type": "application/octet-stream"}
        ),
        server.client.post(
            "/classify",
            content=iter([picture[:9], picture[9:]]),
            headers={"Content-Type": "image/x"},
        ),
        server.client.post(
            "/classify",
            content=picture,
            headers={"Content-Type": "application/x-www-form-urlencoded"},
        ),
        server.client.post("/classify", content=picture),
        server.client.post("/classify", files=[("top_k", (None, "5")), *files(picture)]),
    ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        document = answer.json()
        assert set(document) == {
            "id",
            "model",
            "predictions",
            "abstained",
            "timings_ms",
            "batch_size",
        }
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
        ("POST", "/classify", {"files": [("image", b"x")]}, (400, "malformed_request")),
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
            {
                "content": b"--b\r\nbroken",
                "headers": {"Content-Type": "multipart/form-data; boundary=b"},
            },
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


def test_a_json_log_tells_of_each_request(serve: Serve, pictures: Pictures) -> None:
    server = serve(api_keys="alpha,beta", log_format="json", log_level="debug")
    assert problem(server.classify(pictures.files[0])) == (401, "unauthorized")
    answer = server.classify(pictures.files[0], headers={"Authorization": "Bearer beta"})
    until(
        lambda: server.log.endswith("\n") and server.log.count('"path": "/classify"') == 2
    )  # after the answers
    lines = [json.loads(line) for line in server.log.splitlines()]
    refused, answered = [line for line in lines if line.get("path") == "/classify"]
    assert (refused["status"], refused["code"], answered["status"]) == (401, "unauthorized", 200)
    assert answered["request_id"] == answer.headers["x-request-id"]
    assert (
        answered | {"message": "request", "client": "127.0.0.1", "model": CHECKPOINT_NAME}
        == answered
    )
    assert (answered["bytes_in"], answered["bytes_out"]) == (
        len(pictures.files[0]),
        len(answer.content),
    )
    assert {
        "read_ms",
        "decode_ms",
        "queue_ms",
        "inference_ms",
        "duration_ms",
        "level",
        "logger",
    } <= answered.keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", answered["time"])
    assert not re.search("alpha|beta", server.log)


@pytest.mark.parametrize(("trusted", "client"), [(None, "127.0.0.1"), ("127.0.0.1", "203.0.113.7")])
def test_only_trusted_proxies_name_callers(
    trusted: str | None,
    client: str,
    serve: Serve,
    pictures: Pictures,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    server = serve(log_format="json")
    server.classify(
        pictures.files[0], headers={"X-Forwarded-For": "203.0.113.7"}
    ).raise_for_status()
    until(lambda: f'"client": "{client}"' in server.log)


KEY = "one-of-the-keys"
CALL = """
import io, json, sys
from vitserve_client import AuthenticatedClient
from vitserve_client.api.classify import classify
from vitserve_client.models import ClassifyFilesBody
from vitserve_client.types import File

url, picture, *keys = sys.argv[1:]
raw = lambda: File(payload=open(picture, "rb"), file_name="picture.png")
for key in keys:
    with AuthenticatedClient(url, token=key) as client:
        bodies = (ClassifyFilesBody(file=raw()), raw())
        answers = [classify.sync_detailed(client=client, body=body) for body in bodies]
    print(json.dumps([[answer.status_code, answer.parsed.to_dict()] for answer in answers]))
"""


@pytest.fixture(scope="module")
def keyed(serve_module: Serve) -> Served:
    return serve_module(api_keys=KEY, metrics_public=False)


def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.fixture(scope="module")
def generated(keyed: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the client that openapi-python-client generates without warnings."""
    pytest.importorskip("openapi_python_client", reason="openapi-python-client is not installed")
    folder = tmp_path_factory.mktemp("generated")
    # Its hooks would format the client with any ruff in the PATH.
    (folder / "config.yml").write_text("post_hooks: []\npackage_name_override: vitserve_client\n")
    (folder / "openapi.json").write_text(keyed.get("/openapi.json").text)
    files = ["--path", "openapi.json", "--config", "config.yml", "--output-path", "vitserve_client"]
    done = run(
        "-m",
        "openapi_python_client",
        "generate",
        "--meta=none",
        "--fail-on-warning",
        *files,
        folder=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    return folder


def test_a_generated_client_classifies(
    keyed: Served, pictures: Pictures, generated: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(pictures.files[0])

    done = run("-c", CALL, keyed.url, picture, KEY, "another", folder=generated)

    assert done.returncode == 0, done.stderr
    answers, refusals = map(json.loads, done.stdout.splitlines())
    for status, document in answers:
        assert status == 200
        pictures.check(0, document)
    for status, document in refusals:
        assert (status, document["code"]) == (401, "unauthorized")


def test_schemathesis_finds_nothing(keyed: Served, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")

    done = schemathesis(
        keyed.url,
        "--phases=coverage,stateful",
        "--max-examples=1",
        key=KEY,
        seed=1,
        folder=tmp_path,
        timeout=2 * PATIENCE,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found, done.stdout
    assert found[1] == found[2]
    assert int(found[1]) > 100
    assert re.search(r"(\d+) selected / \1 total", done.stdout)  # all are included
