"""Taught heads over HTTP: teach, classify, list, export, delete, and restart."""

import base64
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from model.extensions.taught.taught_heads import TaughtHead
from service.cli.main import main
from tests.e2e.checkpoints import write_checkpoint
from tests.e2e.serving import (
    CHECKPOINT_NAME,
    LABELS,
    SIZE,
    Pictures,
    Serve,
    Served,
    client,
    problem,
)
from tests.launcher import until
from tests.model.images.pictures import encode

pytestmark = pytest.mark.timeout(120)  # several servers start

RED = (200, 30, 30)
BLUE = (30, 30, 200)
GREEN = (30, 200, 30)
ADMIN = {"Authorization": "Bearer admin-key"}


def picture(colour: tuple[int, int, int], seed: int) -> bytes:
    """Return a picture of about one colour."""
    noise = np.random.default_rng(seed).normal(scale=12, size=(SIZE, SIZE, 3))
    return encode(Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)), "PNG")


def teach(
    server: Served, label: str, pictures: Sequence[bytes], head: str = "colours", **options: Any
) -> httpx.Response:
    files = [("file", (f"{number}.png", content)) for number, content in enumerate(pictures)]
    query = {"label": label} | options.pop("query", {})
    return server.client.post(f"/heads/{head}/examples", params=query, files=files, **options)


def teach_colours(server: Served, head: str = "colours", count: int = 6, **options: Any) -> None:
    for label, colour in {"red": RED, "blue": BLUE}.items():
        pictures = [picture(colour, seed) for seed in range(count)]
        assert teach(server, label, pictures, head, **options).status_code == 201


def described(server: Served, head: str = "colours") -> dict[str, Any]:
    found: dict[str, Any] = server.get(f"/heads/{head}").json()
    return found


def fitted(server: Served, count: int, head: str = "colours") -> dict[str, Any]:
    """Return a head's description once it is fitted to `count` examples."""

    def ready() -> bool:
        states = {each["name"]: each["state"] for each in server.get("/models").json()}
        return described(server, head)["fitted_to"] == count and states.get(head) == "ready"

    until(ready)
    return described(server, head)


@pytest.fixture(scope="module")
def server(serve_module: Serve, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Serve a head that has learned two colours."""
    server = serve_module(teach=tmp_path_factory.mktemp("taught"))
    teach_colours(server)
    fitted(server, 12)
    return server


def test_a_head_answers_as_any_model(server: Served) -> None:
    answer = server.classify(picture(BLUE, 99), "model=colours").json()
    assert (answer["model"], answer["predictions"][0]["label"]) == ("colours", "blue")
    assert {each["label"] for each in answer["predictions"]} == {"red", "blue"}
    assert sum(each["score"] for each in answer["predictions"]) == pytest.approx(1, abs=1e-5)
    assert server.get("/labels", params={"model": "colours"}).json() == {
        "model": "colours",
        "labels": ["red", "blue"],
    }
    [own, taught] = sorted(server.get("/models").json(), key=lambda each: each["taught"])
    assert (own["name"], taught["name"]) == (CHECKPOINT_NAME, "colours")
    assert own["backbone"] == taught["backbone"]
    assert (taught["classes"], taught["state"], taught["default"]) == (2, "ready", False)
    by_label = server.client.post("/predictions/colours", content=picture(RED, 98)).json()
    assert max(by_label, key=by_label.get) == "red"
    body = {
        "inputs": [
            {
                "name": "image",
                "shape": [1],
                "datatype": "BYTES",
                "data": [base64.b64encode(picture(RED, 98)).decode()],
            }
        ]
    }
    outputs = server.client.post("/v2/models/colours/infer", json=body).json()["outputs"]
    assert next(each["data"] for each in outputs if each["name"] == "label")[0] == "red"
    assert server.metric("vit_images_total", model="colours") >= 3


def test_a_head_answers_beside_its_backbone(server: Served, pictures: Pictures) -> None:
    answer = server.classify(pictures.files[0], "model=*&top_k=3").json()
    assert set(answer["models"]) == {CHECKPOINT_NAME, "colours"}
    own = {
        each["index"]: each["score"] for each in answer["models"][CHECKPOINT_NAME]["predictions"]
    }
    alone = server.classify(pictures.files[0], "top_k=3").json()["predictions"]
    assert own == pytest.approx({each["index"]: each["score"] for each in alone}, abs=1e-5)
    seen = server.classify(picture(RED, 97), f"model={CHECKPOINT_NAME},colours").json()["models"]
    assert seen["colours"]["predictions"][0]["label"] == "red"


def test_a_folder_of_another_case_is_refused(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teach_colours(server, "cases", 2)
    for label, colour in {"RED": RED, "blue": BLUE}.items():
        (tmp_path / label).mkdir()
        for seed in range(2):
            (tmp_path / label / f"{seed}.png").write_bytes(picture(colour, seed))
    assert main(["teach", "cases", str(tmp_path), "--url", server.url]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "vitserve:" in line]
    assert len(errors) == 1 and "'RED' differs only by case or spaces from 'red'" in errors[0]
    answer = server.client.put("/heads/cases/examples/1", params={"label": "Red"})
    assert problem(answer) == (422, "invalid_parameter")
    assert described(server, "cases")["examples"] == {"red": 2, "blue": 2}
    assert server.client.delete("/heads/cases").status_code == 204


def test_an_unlike_picture_is_abstained_from(server: Served) -> None:
    answer = server.classify(picture(GREEN, 1), "model=colours").json()
    assert (answer["abstained"], answer["abstained_by"]) == (True, "distance")
    assert answer["predictions"], "the nearest labels"
    assert not server.classify(picture(RED, 96), "model=colours").json()["abstained"]
    assert server.client.post("/predictions/colours", content=picture(GREEN, 1)).json() == {}


def test_maps_are_of_the_heads_labels(server: Served) -> None:
    answer = server.classify(picture(RED, 95), "model=colours&attention=relevance").json()
    assert (answer["attention"]["label"], answer["attention"]["class"]) == ("red", 0)
    assert np.sum(answer["attention"]["values"]) == pytest.approx(1, abs=1e-4)
    kept = server.get(answer["attention"]["url"] + "&format=json").json()
    np.testing.assert_allclose(kept["values"], answer["attention"]["values"], atol=1e-5)
    other = server.get(f"/attention?id={answer['id']}&model=colours&class=blue&format=json").json()
    assert (other["label"], other["method"]) == ("blue", "relevance")
    assert other["score"] < 0.5
    row = server.get(f"/attention?id={answer['id']}&model=colours&method=cls&format=json").json()
    assert row["method"] == "cls"


def test_a_head_knows_itself(server: Served) -> None:
    known = described(server)
    assert server.get("/heads").json() == {"enabled": True, "heads": ["colours"]}
    assert known["examples"] == {"red": 6, "blue": 6}
    assert (known["accuracy"]["value"], known["accuracy"]["high"], known["accuracy"]["folds"]) == (
        1.0,
        1.0,
        5,
    )
    assert 0.7 < known["accuracy"]["low"] < 0.8
    assert known["confusion"] == known["suspects"] == known["needs_more"] == []
    assert known["up_to_date"] is True
    assert known["backbone"].startswith(server.get("/models").json()[0]["backbone"].split("-")[0])
    listed = server.get("/heads/colours/examples").json()
    assert [each["number"] for each in listed["examples"]] == list(range(1, 13))
    assert {each["label"] for each in listed["examples"]} == {"red", "blue"}
    exported = TaughtHead.from_bytes(server.get("/heads/colours/export").content, "export")
    assert exported.head.labels == ("red", "blue")


def test_examples_can_be_added_or_corrected(serve: Serve, tmp_path: Path) -> None:
    server = serve(teach=tmp_path / "taught")
    teach_colours(server, count=4)
    counts = {"head": "colours", "examples": {"red": 5, "blue": 4}, "numbers": [9]}
    raw = server.client.post("/heads/colours/examples?label=red", content=picture(RED, 50))
    assert (raw.status_code, raw.json()) == (201, counts)
    body = {"image": base64.b64encode(picture(RED, 51)).decode()}
    assert (
        server.client.post("/heads/colours/examples?label=red", json=body).json()["examples"]["red"]
        == 6
    )
    for label in (
        "Caf\u00e9 \u2764\ufe0f",
        "Cafe\u0301 \u2764\ufe0f",
    ):  # one text in two Unicode forms
        named = teach(server, label, [picture(GREEN, 1)], "other").json()
    assert named["examples"] == {"Caf\u00e9 \u2764\ufe0f": 1}
    image_id = server.classify(picture(BLUE, 52)).json()["id"]
    wrong = server.client.post(f"/heads/colours/examples?label=red&id={image_id}")
    assert wrong.json()["examples"] == {"red": 7, "blue": 4}
    [suspect] = fitted(server, 11)["suspects"]
    assert (suspect["number"], suspect["label"], suspect["likely"]) == (11, "red", "blue")
    mended = server.client.delete(f"/heads/colours/examples/{suspect['number']}")
    assert mended.json()["examples"] == {"red": 6, "blue": 4}
    assert fitted(server, 10)["suspects"] == []
    teach(server, "green", [picture(GREEN, seed) for seed in range(4)])
    assert fitted(server, 14)["needs_more"] == ["blue", "green"]
    assert (
        server.classify(picture(GREEN, 53), "model=colours").json()["predictions"][0]["label"]
        == "green"
    )


def test_a_restart_restores_taught_heads(serve: Serve, tmp_path: Path) -> None:
    first = serve(teach=tmp_path / "taught")
    teach_colours(first)
    before = fitted(first, 12)
    first.process.terminate()
    again = serve(teach=tmp_path / "taught")
    assert fitted(again, 12) == before
    assert (
        again.classify(picture(RED, 60), "model=colours").json()["predictions"][0]["label"] == "red"
    )
    again.process.terminate()
    other = write_checkpoint(tmp_path, "other", (SIZE, SIZE), LABELS, seed=9)
    third = serve(teach=tmp_path / "taught", checkpoint=other)
    until(
        lambda: (
            {each["name"]: each["state"] for each in third.get("/models").json()}["colours"]
            == "failed"
        )
    )
    failed = next(each for each in third.get("/models").json() if each["name"] == "colours")
    assert f"no model is served with the backbone of {CHECKPOINT_NAME}" in failed["reason"]
    refused = third.classify(picture(RED, 61), "model=colours")
    assert (refused.status_code, refused.json()["code"]) == (409, "head_without_backbone")
    added = teach(third, "red", [picture(RED, 62)])
    assert (added.status_code, added.json()["code"]) == (409, "head_without_backbone")
    assert described(third)["examples"] == {"red": 6, "blue": 6}


GOOD = picture(RED, 70)
INVALID = (422, "invalid_parameter")
MISSING = (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "options", "expected"),
    [
        ("POST", "colours/examples", {"content": GOOD}, INVALID),
        *(
            ("POST", "colours/examples", {"params": {"label": label}, "content": GOOD}, INVALID)
            for label in (" ", "x" * 300, "\u200b", "\u202etac", "\n", "\u0301")
        ),
        ("POST", "colours/examples?label=caf%E9", {"content": GOOD}, INVALID),
        ("POST", "colours/examples?label=red&id=unknown", {}, INVALID),
        (
            "POST",
            "colours/examples?label=red",
            {"content": b"no picture"},
            (415, "unsupported_media_type"),
        ),
        ("POST", "colours/examples?label=red", {}, (422, "invalid_image")),
        ("POST", f"{CHECKPOINT_NAME}/examples?label=red", {"content": GOOD}, (409, "name_taken")),
        ("POST", f"{'a' * 200}/examples?label=red", {"content": GOOD}, INVALID),
        ("POST", "new/examples?label=red&backbone=none", {"content": GOOD}, (404, "unknown_model")),
        *(("GET", f"none{each}", {}, MISSING) for each in ("", "/examples", "/export")),
        *(("DELETE", each, {}, MISSING) for each in ("none", "colours/examples/999")),
    ],
)
def test_bad_requests_add_no_example(
    method: str, path: str, options: dict[str, Any], expected: tuple[int, str], server: Served
) -> None:
    assert problem(server.client.request(method, f"/heads/{path}", **options)) == expected
    assert described(server)["examples"] == {"red": 6, "blue": 6}


def test_refused_pictures_add_no_example(
    server: Served,
) -> None:
    some = teach(server, "red", [GOOD, GOOD[:60], GOOD])
    assert (problem(some), "picture 1" in some.json()["detail"]) == ((422, "invalid_image"), True)
    kept = server.classify(GOOD).json()["id"]
    assert (
        problem(server.client.post(f"/heads/colours/examples?label=red&id={kept}", content=GOOD))
        == INVALID
    )
    assert described(server)["examples"] == {"red": 6, "blue": 6}


def test_a_head_with_few_examples_is_refused(serve: Serve, tmp_path: Path) -> None:
    server = serve(teach=tmp_path / "taught")
    assert teach(server, "red", [picture(RED, 1)]).status_code == 201
    reason = "needs at least two labels with two pictures each"
    assert described(server)["reason"] == reason
    refused = server.classify(picture(RED, 2), "model=colours")
    assert (refused.status_code, refused.json()["code"]) == (409, "head_without_examples")
    assert "Retry-After" not in refused.headers
    [status] = [each for each in server.get("/models").json() if each["name"] == "colours"]
    assert (status["state"], status["reason"]) == ("loading", reason)
    assert 'vit_model_state{model="colours",state="failed"} 0.0' in server.get("/metrics").text


def test_teach_command_fails_without_a_head(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "red").mkdir()
    for seed in range(3):
        (tmp_path / "red" / f"{seed}.png").write_bytes(picture(RED, seed))
    assert main(["teach", "one-label", str(tmp_path), "--url", server.url]) == 1
    assert (
        capsys.readouterr().out == "one-label: needs at least two labels with two pictures each\n"
    )
    assert server.client.delete("/heads/one-label").status_code == 204
    assert main(["teach", "one-label", str(tmp_path), "--url", server.url, "--model", "none"]) == 1
    assert "404 unknown_model" in capsys.readouterr().err
    assert "one-label" not in server.get("/heads").json()["heads"], (
        "it would be of another model than was asked for"
    )
    assert main(["teach", CHECKPOINT_NAME, str(tmp_path), "--url", server.url]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "409 name_taken" in line


def test_every_worker_has_a_head_soon(serve: Serve, tmp_path: Path) -> None:
    server = serve(teach=tmp_path / "taught", workers=2)
    teach_colours(server)
    fitted(server, 12)
    # Each connection belongs to one worker; a hundred connections reach both.
    until(lambda: all(ask(server) == "red" for _ in range(20)))
    assert server.client.delete("/heads/colours").status_code == 204
    until(lambda: all(ask(server) is None for _ in range(20)))
    teach_colours(server, count=3)
    assert fitted(server, 6)["examples"] == {"red": 3, "blue": 3}, (
        "nothing is left of the one that was deleted"
    )


def ask(server: Served) -> str | None:
    """Return a worker's answer to a red picture; None if the worker does not know the head yet."""
    with client(server.url) as own:
        answer = own.post(
            "/classify?model=colours",
            content=picture(RED, 33),
            headers={"Content-Type": "image/png"},
        )
    return answer.json()["predictions"][0]["label"] if answer.status_code == 200 else None


def test_a_head_file_is_served_as_a_model(
    server: Served, serve: Serve, tmp_path: Path, checkpoint: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "models" / "tiny")
    (tmp_path / "models" / "mine.safetensors").write_bytes(
        server.get("/heads/colours/export").content
    )
    other = serve(models=tmp_path / "models", checkpoint="", teach=tmp_path / "taught")
    until(
        lambda: (
            {each["name"]: each["state"] for each in other.get("/models").json()}
            == {"tiny": "ready", "mine": "ready"}
        )
    )
    answer = other.classify(picture(BLUE, 34), "model=mine").json()
    assert (answer["model"], answer["predictions"][0]["label"]) == ("mine", "blue")
    taken = teach(other, "red", [picture(RED, 35)], "mine")
    assert (taken.status_code, taken.json()["code"]) == (409, "name_taken")


def test_heads_share_no_name_with_models(serve: Serve, tmp_path: Path) -> None:
    server = serve(teach=tmp_path / "taught", admin_key="admin-key", checkpoint_folder=tmp_path)
    teach_colours(server, count=2)
    until(lambda: "colours" in {each["name"] for each in server.get("/models").json()})
    taken = server.client.put("/models/colours", json={"checkpoint": "taught"}, headers=ADMIN)
    assert (taken.status_code, taken.json()["code"]) == (409, "name_taken")
    without_key = server.client.delete("/models/colours")
    assert "DELETE /heads/colours removes it" in without_key.json()["detail"]
    kept = server.client.delete("/models/colours", headers=ADMIN)
    assert (kept.status_code, kept.json()["code"]) == (403, "forbidden")


def test_without_a_folder_nothing_is_taught(serve: Serve) -> None:
    server = serve()
    assert server.get("/heads").json() == {"enabled": False, "heads": []}
    answer = teach(server, "red", [picture(RED, 1)])
    assert answer.status_code == 404
    assert "VIT_TEACH" in answer.json()["detail"]


def test_an_unnamed_key_keeps_its_heads(serve: Serve, tmp_path: Path) -> None:
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    server = serve(teach=tmp_path / "taught", api_keys="one,two")
    until(lambda: server.get("/readyz").status_code == 200)
    teach_colours(server, headers=second)
    server.process.terminate()
    again = serve(teach=tmp_path / "taught", api_keys="two,one")
    until(lambda: again.get("/readyz").status_code == 200)
    assert teach(again, "red", [picture(RED, 7)], headers=first).status_code == 403
    assert teach(again, "red", [picture(RED, 7)], headers=second).status_code == 201
    listed = again.get("/heads/colours/examples", headers=second).text
    assert '"who"' in listed
    assert '"two"' not in listed


def test_a_key_changes_only_its_own_heads(serve: Serve, tmp_path: Path) -> None:
    server = serve(teach=tmp_path / "taught", api_keys="alice:one,bob:two", admin_key="admin-key")
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    until(lambda: server.get("/readyz").status_code == 200)
    assert teach(server, "red", [picture(RED, 1)]).status_code == 401
    teach_colours(server, headers=alice)
    listed = server.get("/heads/colours/examples", headers=alice).json()["examples"]
    assert listed[0]["who"] == "alice"
    assert teach(server, "red", [picture(RED, 22)], headers=bob).status_code == 403
    assert teach(server, "red", [picture(RED, 22)], headers=ADMIN).status_code == 201
    assert server.get("/heads", headers=ADMIN).json()["heads"] == ["colours"]
    path = "/heads/colours/examples/13"
    assert server.client.put(path, params={"label": "blue"}, headers=bob).status_code == 403
    assert server.client.put(path, params={"label": " "}, headers=alice).status_code == 422
    moved = server.client.put(path, params={"label": "blue"}, headers=alice)
    assert moved.json() == {"head": "colours", "examples": {"red": 6, "blue": 7}}
    for path in ("/heads/colours/examples/1", "/heads/colours"):
        refused = server.client.delete(path, headers=alice)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        assert server.client.delete(path, headers=ADMIN).status_code in (200, 204)
    assert server.get("/heads/colours", headers=alice).status_code == 404
    # Like examples that were added before keys were set.
    assert teach(server, "red", [picture(RED, 1)], "nobodys", headers=ADMIN).status_code == 201
    assert teach(server, "red", [picture(RED, 2)], "nobodys", headers=alice).status_code == 403
