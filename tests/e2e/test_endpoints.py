"""Every endpoint, format and error of a running service, over real HTTP."""

from __future__ import annotations

import io
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.e2e.serving import CHECKPOINT_NAME, LABELS, LOG_LINE, Pictures, Serve, Served, problem
from tests.launcher import until

pytestmark = pytest.mark.timeout(180)  # servers start and end

Files = list[tuple[str, tuple[str, bytes]]]


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    return serve_module(max_upload_bytes=200_000, max_image_pixels=1_000_000, max_images_per_request=8)


def files(*pictures: bytes) -> Files:
    return [("file", (f"{i}.png", picture)) for i, picture in enumerate(pictures)]


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


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
        document = answer.json()
        assert document["model"] == CHECKPOINT_NAME
        assert len(document["predictions"]) == 5
        assert all(p["label"] == LABELS[p["index"]] for p in document["predictions"])
        pictures.check(0, document)
        assert set(document["timings_ms"]) == {"decode", "queue", "inference", "total"}
        assert document["timings_ms"]["total"] >= document["timings_ms"]["inference"] > 0
        assert document["batch_size"] == 1


def test_a_batch_answers_each_picture_or_its_own_error_in_order(server: Served, pictures: Pictures) -> None:
    good, bad = pictures.files[1], pictures.files[2][:60]
    answer = server.client.post("/classify/batch?top_k=10", files=files(good, bad, b"text", b"", pictures.files[3]))
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [r.get("error", {}).get("code") for r in results] == [
        None,
        "invalid_image",
        "unsupported_media_type",
        "invalid_image",
        None,
    ]
    pictures.check(1, results[0])
    pictures.check(3, results[4])


def test_attention_comes_with_the_labels_and_sums_to_one(server: Served, pictures: Pictures) -> None:
    document = server.classify(pictures.files[4], "attention=true").json()
    attention = document["attention"]
    assert attention["url"] == f"/attention?id={document['id']}&method=cls"
    assert (attention["grid"], attention["layer"], attention["head"]) == ([4, 4], 1, "mean")
    values = np.array(attention["values"])
    assert values.shape == (4, 4)
    assert values.sum() == pytest.approx(1, abs=1e-5)
    assert 0 < attention["kept_mass"] < 1


def test_a_kept_picture_is_drawn_saved_and_told(server: Served, pictures: Pictures) -> None:
    url = server.classify(pictures.files[5], "attention=true").json()["attention"]["url"]
    drawn = server.get(url)
    assert drawn.headers["content-type"] == "image/png"
    picture = Image.open(io.BytesIO(drawn.content))
    picture.load()
    assert (picture.format, picture.mode, picture.width) == ("PNG", "RGB", 384)
    assert picture.height > 384, "with a caption"
    for size in (64, 2048):
        assert max(Image.open(io.BytesIO(server.get(f"{url}&size={size}").content)).size) == size
        plain = server.get(f"{url}&size={size}&caption=false")
        assert Image.open(io.BytesIO(plain.content)).size == (size, size)

    told = server.get(f"{url}&format=json").json()
    saved = np.load(io.BytesIO(server.get(f"{url}&format=npy").content), allow_pickle=False)
    assert (saved.dtype, saved.shape) == (np.float32, (4, 4))
    assert np.allclose(saved, told["values"], atol=1e-6)
    assert saved.sum() == pytest.approx(1, abs=1e-5)


def test_what_is_served_is_told(server: Served) -> None:
    model = server.get("/model").json()
    assert model["name"] == CHECKPOINT_NAME
    assert (model["input_size"], model["patch_size"], model["grid"]) == ([16, 16], 4, [4, 4])
    assert (model["classes"], model["layers"], model["heads"]) == (10, 2, 2)
    assert (model["device"], model["dtype"], model["attention_source"]) == ("cpu", "float32", "cls")
    assert model["compiled"].startswith("off")
    assert model["preprocessing"]["interpolation"] == "bicubic"
    assert server.get("/labels").json() == {"model": CHECKPOINT_NAME, "labels": list(LABELS)}
    assert server.get("/healthz").status_code == server.get("/readyz").status_code == 200
    assert "text/html" in server.get("/").headers["content-type"]
    assert server.get("/docs").status_code == 200
    assert "/classify" in server.get("/openapi.json").json()["paths"]
    assert server.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


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


def test_metrics_agree_with_what_was_asked(serve: Serve, pictures: Pictures) -> None:
    server = serve()
    for picture in pictures.files[:5]:
        server.classify(picture)
    server.client.post("/classify/batch", files=files(*pictures.files[:10], b"text"))
    server.classify(b"text")
    server.get("/nope")
    assert server.metric("vit_images_total") == 15
    assert server.metric("vit_batch_size_sum", device="cpu") == 15
    assert server.metric("vit_batches_total", device="cpu") == server.metric("vit_batch_size_count", device="cpu")
    assert server.metric("vit_top1_score_count") == 15
    assert server.metric("vit_requests_total", endpoint="/classify", code="200") == 5
    assert server.metric("vit_requests_total", endpoint="/classify", code="415") == 1
    assert server.metric("vit_requests_total", endpoint="/classify/batch", code="200") == 1
    assert server.metric("vit_requests_total", endpoint="other", code="404") == 1
    assert server.metric("vit_rejected_total", reason="unsupported_media_type") == 2
    assert server.metric("vit_recent_images") == 15
    assert server.metric("vit_engine_up", device="cpu") == 1
    assert server.metric("vit_model_info", model=CHECKPOINT_NAME, device="cpu", dtype="float32") == 1
    assert server.metric("vit_stage_duration_seconds_count", stage="inference") == 15
    assert server.idle()


def test_keys_cors_json_logs_and_short_memories(serve: Serve, pictures: Pictures) -> None:
    server = serve(
        api_keys="alpha,beta",
        metrics_public="false",
        cors_origins="https://app.example",
        log_format="json",
        log_level="debug",
        recent_ttl=0.5,
    )
    with_key = {"Authorization": "Bearer beta"}
    assert problem(server.classify(pictures.files[0])) == (401, "unauthorized")
    assert server.classify(pictures.files[0]).headers["www-authenticate"] == "Bearer"
    assert problem(server.get("/metrics")) == (401, "unauthorized")
    assert server.get("/metrics", headers=with_key).status_code == 200
    for path in ("/", "/docs", "/openapi.json", "/healthz", "/readyz"):
        assert server.get(path).status_code == 200

    answer = server.classify(pictures.files[0], headers=with_key | {"Origin": "https://app.example"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"

    kept = f"/attention?id={answer.json()['id']}&format=npy"
    until(lambda: server.get(kept, headers=with_key).status_code != 200)
    assert problem(server.get(kept, headers=with_key)) == (404, "not_found")

    lines = [httpx.Response(200, content=line).json() for line in server.log.splitlines()]
    requests = [line for line in lines if line.get("path") == "/classify"]
    assert [line["status"] for line in requests] == [401, 401, 200]
    assert requests[-1]["request_id"] == answer.headers["x-request-id"]
    assert requests[-1] | {"message": "request", "client": "127.0.0.1", "model": CHECKPOINT_NAME} == requests[-1]
    assert requests[-1]["bytes_in"] == len(pictures.files[0])
    assert requests[-1]["bytes_out"] == len(answer.content)
    assert {"read_ms", "decode_ms", "queue_ms", "inference_ms"} <= requests[-1].keys()
    assert requests[0]["code"] == "unauthorized"
    assert "alpha" not in server.log
    assert "beta" not in server.log


@pytest.mark.parametrize(("trusted", "client"), [(None, "127.0.0.1"), ("127.0.0.1", "203.0.113.7")])
def test_a_forwarded_address_is_believed_of_a_trusted_proxy_alone(
    trusted: str | None, client: str, serve: Serve, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    server = serve(log_format="json")
    server.classify(pictures.files[0], headers={"X-Forwarded-For": "203.0.113.7"}).raise_for_status()
    until(lambda: f'"client": "{client}"' in server.log)
