"""GET and POST /attention."""

import asyncio
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model.methods import methods
from service.errors import DeadlineExceeded
from tests.model.images.pictures import encode
from tests.needs import needs_methods
from tests.service.fakes import SIZE, model_info, on_a_loop, png
from tests.service.web.apps import App, app, form, kept, service_in


@on_a_loop
async def test_a_kept_picture_has_every_format(service: App) -> None:
    image_id = await kept(service)
    drawn = await service.get("/attention", f"id={image_id}")
    assert drawn.headers["content-type"] == "image/png"
    picture = Image.open(io.BytesIO(drawn.content))
    assert (picture.format, picture.mode, picture.width) == ("PNG", "RGB", 384)
    assert 384 < picture.height < 450, "a caption stands below"
    plain = await service.get("/attention", f"id={image_id}&size=64&caption=false")
    assert Image.open(io.BytesIO(plain.content)).size == (64, 64)

    document = (await service.get("/attention", f"id={image_id}&format=json")).json
    assert set(document) == {
        "id",
        "method",
        "class",
        "label",
        "grid",
        "values",
        "kept_mass",
        "region",
    } | {
        "score",
        "evidence",
        "abstained",
    }
    assert (document["score"], document["evidence"]) == (0.5, 0.25)
    assert (document["id"], document["method"], document["class"]) == (image_id, "relevance", 0)
    assert document["label"] == "label 0"
    assert (document["grid"], document["values"]) == ([2, 2], [[0.1, 0.2], [0.3, 0.4]])
    assert document["region"] == {"x": 0, "y": 0, "width": SIZE, "height": SIZE}

    saved = await service.get("/attention", f"id={image_id}&format=npy")
    array = np.load(io.BytesIO(saved.content), allow_pickle=False)
    assert (array.dtype, array.shape) == (np.float32, (2, 2))
    assert np.allclose(array, [[0.1, 0.2], [0.3, 0.4]])

    for response in (drawn, saved):
        assert response.headers["content-location"] == f"/attention?id={image_id}"


@on_a_loop
@pytest.mark.parametrize("format_", ["png", "json", "npy"])
async def test_only_private_caches_keep_a_map(service: App, format_: str) -> None:
    image_id = await kept(service)
    for response in (
        await service.get("/attention", f"id={image_id}&format={format_}"),
        await service.request("POST", "/attention", query=f"format={format_}", **form(png(9))),
    ):
        assert response.headers["cache-control"] == "private"
        assert response.headers["x-content-type-options"] == "nosniff"


@on_a_loop
async def test_a_posted_picture_is_explained(service: App) -> None:
    response = await service.request("POST", "/attention", query="format=json", **form(png(9)))
    assert response.status == 200
    image_id = response.json["id"]
    again = await service.get("/attention", f"id={image_id}&format=json")
    assert again.json == response.json
    assert (service.metric("vit_images_total"), service.metric("vit_top1_score_count")) == (1, 1)


@on_a_loop
@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("method=gradcam", ", ".join(methods())),
        ("method=", "cls"),
        ("method=relevance&layer=0", "layer does not apply to method 'relevance'"),
        ("method=relevance&head=max", "head does not apply to method 'relevance'"),
        ("method=cls&class=3", "class does not apply to method 'cls'"),
        pytest.param(
            "method=rollout&class=3",
            "class does not apply to method 'rollout'",
            marks=needs_methods,
        ),
        ("layer=0&class=3", "class does not apply to method 'cls'"),
        ("class=10", "class '10' is unknown"),
        ("class=", "class '' is unknown"),
        ("class=label", "class 'label' is unknown"),
        ("class=1,2,3,4,5,6,7,8,9", "more than 8 classes"),
        ("layer=3", "layer"),
        ("layer=-4", "layer"),
        ("layer=last", "layer"),
        ("head=2", "head"),
        ("head=-1", "head"),
        ("head=%C2%B2", "head"),
        ("head=median", "head"),
        ("format=gif", "format"),
        ("format=json&overlay=false", "overlay does not apply"),
        ("format=json&alpha=0.5", "alpha does not apply"),
        ("format=npy&colormap=magma", "colormap does not apply"),
        ("format=npy&size=100", "size does not apply"),
        ("format=json&view=input", "view"),
        ("format=npy&view=photo", "view"),
        ("format=json&smooth=true", "smooth does not apply"),
        ("format=json&caption=false", "caption does not apply"),
        ("caption=perhaps", "caption"),
        ("colormap=pink-elephants", "inferno"),
        ("alpha=1.1", "alpha"),
        ("alpha=-0.1", "alpha"),
        ("alpha=nan", "alpha"),
        ("overlay=false&alpha=0.5", "alpha does not apply"),
        ("overlay=false&view=input", "view does not apply"),
        ("overlay=false&view=photo", "view"),
        ("view=original", "view"),
        ("view=", "view"),
        ("smooth=perhaps", "smooth"),
        ("size=0", "size"),
        ("size=2049", "size"),
        ("overlay=perhaps", "overlay"),
    ],
)
async def test_a_refusal_names_its_parameter(service: App, query: str, says: str) -> None:
    by_id = await service.get("/attention", f"id={await kept(service)}&{query}")
    posted = await service.request("POST", "/attention", query=query, **form(png(1)))
    for response in (by_id, posted):
        assert (response.status, response.code) == (422, "invalid_parameter")
        assert says in response.json["detail"]


@on_a_loop
@pytest.mark.parametrize(
    ("query", "answered"),
    [
        ("", {"method": "relevance", "class": 7, "label": "label 7"}),
        pytest.param(
            "method=gae", {"method": "gae", "class": 7, "label": "label 7"}, marks=needs_methods
        ),
        ("class=3", {"method": "relevance", "class": 3, "label": "label 3"}),
        pytest.param(
            "method=gae&class=Label%205",
            {"method": "gae", "class": 5, "label": "label 5"},
            marks=needs_methods,
        ),
        ("method=cls", {"method": "cls", "layer": 2, "head": "mean"}),
        ("layer=0", {"method": "cls", "layer": 0, "head": "mean"}),
        ("head=max", {"method": "cls", "layer": 2, "head": "max"}),
    ],
)
async def test_a_map_has_the_requested_method(
    service: App, query: str, answered: dict[str, Any]
) -> None:
    document = (
        await service.get("/attention", f"id={await kept(service, 7)}&format=json&{query}")
    ).json
    names = ("method", "class", "label", "layer", "head")
    assert {name: document[name] for name in names if name in document} == answered


@on_a_loop
async def test_several_classes_have_a_map_each(service: App) -> None:
    query = f"id={await kept(service)}&class=label%204,2,label%201&"
    documents = (await service.get("/attention", f"{query}format=json")).json
    assert [document["class"] for document in documents] == [4, 2, 1]
    saved = await service.get("/attention", f"{query}format=npy")
    array = np.load(io.BytesIO(saved.content), allow_pickle=False)
    assert (array.dtype, array.shape) == (np.float32, (3, 2, 2))
    drawn = await service.get("/attention", f"{query}size=100")
    assert Image.open(io.BytesIO(drawn.content)).size == (308, 100)
    posted = await service.request(
        "POST", "/attention", query="class=4,2&format=json", **form(png(9))
    )
    assert [document["class"] for document in posted.json] == [4, 2]


@on_a_loop
async def test_a_disconnect_cancels_all_maps(service: App) -> None:
    image_id = await kept(service)
    service.engine.gate.clear()
    asking = asyncio.create_task(service.get("/attention", f"id={image_id}&class=1,2,3"))
    while service.engine.waiting < 3:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (service.engine.waiting, service.engine.cancelled) == (0, 3)
    assert service_in(service).limiter.in_use == 0


def crops(monkeypatch: pytest.MonkeyPatch, service: App) -> None:
    """Configure the model to see the middle square of a photo."""
    info = model_info()
    cropping = info.preprocess.model_copy(update={"resize": "shortest_edge"})
    monkeypatch.setattr(service.engine, "info", replace(info, preprocess=cropping))


def two_halves(orientation: int) -> bytes:
    """Return a file of 40 x 20 pixels, left half red and right half blue."""
    picture = Image.new("RGB", (40, 20), (200, 0, 0))
    picture.paste((0, 0, 200), (20, 0, 40, 20))
    return encode(picture, "PNG", orientation)


@on_a_loop
async def test_the_region_is_in_upright_pixels(
    service: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    crops(monkeypatch, service)
    posted = (
        await service.request("POST", "/attention", query="format=json", **form(two_halves(6)))
    ).json
    assert posted["region"] == {"x": 0, "y": 10, "width": 20, "height": 20}  # 20 x 40 when upright
    classified = (await service.classify(two_halves(6), query="attention=true")).json
    assert classified["attention"]["region"] == posted["region"]
    kept_one = await service.get("/attention", f"id={classified['id']}&format=json")
    assert kept_one.json["region"] == posted["region"]


@on_a_loop
async def test_small_models_draw_over_the_photo(
    monkeypatch: pytest.MonkeyPatch, service: App
) -> None:
    crops(monkeypatch, service)
    response = await service.request(
        "POST", "/attention", query="alpha=0&size=80", **form(two_halves(1))
    )
    pixels = np.asarray(Image.open(io.BytesIO(response.content)))
    assert pixels.shape == (40, 80, 3)
    assert [pixels[20, column].tolist() for column in (10, 30, 50, 70)] == [
        [70, 0, 0],
        [200, 0, 0],
        [0, 0, 200],
        [0, 0, 70],
    ]


@on_a_loop
async def test_an_unknown_or_missing_id_is_refused(service: App) -> None:
    unknown = await service.get("/attention", "id=nobody")
    assert (unknown.status, unknown.code) == (404, "not_found")
    missing = await service.get("/attention")
    assert (missing.status, missing.code) == (422, "invalid_parameter")
    assert missing.json["detail"].startswith("id")


@on_a_loop
async def test_a_kept_picture_has_no_photo(service: App) -> None:
    image_id = await kept(service)
    refused = await service.get("/attention", f"id={image_id}&view=photo")
    assert (refused.status, refused.code) == (422, "invalid_parameter")
    assert refused.json["detail"] == (
        "view: only the model's input is kept, not the photo; POST /attention draws over it"
    )
    assert (await service.get("/attention", f"id={image_id}&view=input")).status == 200


@on_a_loop
async def test_a_map_takes_a_slot_like_a_picture() -> None:
    service = app(queue_size=1)
    image_id = await kept(service)
    with service_in(service).limiter.permit():
        full = await service.get("/attention", f"id={image_id}")
    assert (full.status, full.code) == (503, "queue_full")
    service.engine.error = DeadlineExceeded("late")
    late = await service.get("/attention", f"id={image_id}")
    assert (late.status, late.code) == (504, "deadline_exceeded")
    assert service_in(service).limiter.in_use == 0
