"""The page of a service with several models: choice, comparison, and models that disappear."""

import io
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from PIL import Image

from model.checkpoint import BUNDLED
from tests.e2e.page.browser import Browser, Page, Route, Tab, audit, expect, tab
from tests.e2e.page.conftest import serving
from tests.e2e.page.steps import (
    CAT,
    DOG,
    Open,
    answers,
    choose,
    map_shown,
    open_choices,
    pixels,
    require_no_overflow,
    send_event,
)
from tests.e2e.serving import Served
from tests.launcher import until
from tests.model.checkpoint import whole_models

pytestmark = pytest.mark.timeout(180)  # a server and a browser start

GERMAN = (
    "Flugzeug",
    "Auto",
    "Vogel",
    "Katze",
    "Hirsch",
    "Hund",
    "Frosch",
    "Pferd",
    "Schiff",
    "Lastwagen",
)
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def models_server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the bundled model: as it is, with other labels, resized, and with one-word labels."""
    folder = tmp_path_factory.mktemp("models")
    whole_models.clip(folder / "words")
    (folder / "german.txt").write_text("\n".join(GERMAN))
    for name, setting in (
        ("english", ""),
        ("german", 'labels = "german.txt"'),
        ("large", "image_size = 48"),
    ):
        (folder / f"{name}.toml").write_text(f'checkpoint = "{BUNDLED}"\n{setting}\n')
    with serving(
        folder, models=folder, admin_key="admin", checkpoint_folder=BUNDLED.parent
    ) as served:
        until(lambda: all(each["state"] == "ready" for each in served.get("/models").json()))
        yield served


@pytest.fixture
def open_models(browser: Browser, models_server: Served) -> Open:
    return partial(tab, browser, f"{models_server.url}/")


@pytest.fixture
def found(open_models: Open) -> Iterator[Tab]:
    with open_models() as found:
        yield found


def queries(page: Page) -> list[dict[str, str]]:
    """Collect the queries of all later requests to /classify and /attention."""
    sent: list[dict[str, str]] = []

    def note(url: str) -> None:
        parts = urlsplit(url)
        if parts.path in {"/classify", "/attention"}:
            query = {name: value for name, [value] in parse_qs(parts.query).items()}
            sent.append({"path": parts.path} | query)

    page.on("request", lambda request: note(request.url))
    return sent


def side_by_side(page: Page, second: str) -> None:
    page.get_by_label("Second model").select_option(second)
    expect(page.locator("figure.map")).to_have_count(2)
    for index in (0, 1):
        map_shown(page, index)


def test_one_model_leaves_no_choice(open_page: Open) -> None:
    with open_page() as found:
        sent = queries(found.page)
        choose(found.page, DOG)
        map_shown(found.page)
        expect(found.page.locator("#choice, .of-model:visible").first).to_be_hidden()
        assert sent and not any("model" in query for query in sent)


def test_the_keyboard_chooses_a_model(page: Page) -> None:
    sent = queries(page)
    choose(page, DOG)
    assert answers(page)[0] == "dog"
    which = page.get_by_role("combobox", name="Model", exact=True)
    expect(which).to_have_value("english")  # the default
    which.focus()
    with page.expect_request(re.compile(r"/model\?model=german&prepare_maps=true")):
        page.keyboard.press("ArrowDown")
    expect(page.locator(".answer .label").first).to_have_text("Hund")
    expect(which).to_be_focused()
    expect(page.locator("#model")).to_contain_text("german on cpu")
    map_shown(page)
    page.locator(".answer").nth(1).click()
    expect(page.locator(".readout")).to_contain_text(answers(page)[1])
    map_shown(page)
    assert [query["model"] for query in sent] == ["english", "german", "german"]
    page.get_by_text("The same request with curl").click()
    for line in page.locator("#curl-text").inner_text().splitlines():
        assert "model=german" in line


def test_two_models_stand_side_by_side(page: Page, models_server: Served) -> None:
    choose(page, DOG)
    map_shown(page)
    sent = queries(page)
    side_by_side(page, "large")
    assert [(query["path"], query["model"]) for query in sent] == [("/classify", "english,large")]
    lists = page.get_by_role("list", name="Classes by score, ")
    expect(lists).to_have_count(2)
    figures = page.locator("figure.map")
    expect(figures.nth(0)).to_have_attribute("aria-label", "Map of english")
    expect(figures.nth(1)).to_have_attribute("aria-label", "Map of large")
    one, other = (figures.nth(index).bounding_box() for index in (0, 1))
    assert one is not None and other is not None
    assert one["y"] == other["y"] and one["x"] + one["width"] <= other["x"]
    expect(page.locator("#said[role=status]")).to_have_text(
        re.compile(r"^dog\.jpg: english: dog, 9.*; large: \w+, ")
    )
    expect(page.get_by_label("Compare two maps")).to_be_hidden()
    # An answer of the second model has its map there only.
    chosen = lists.nth(1).locator(".answer").nth(2)
    chosen.click()
    expect(page.locator(".readout").nth(1)).to_contain_text(chosen.locator(".label").inner_text())
    map_shown(page, 1)
    expect(chosen).to_have_attribute("aria-pressed", "true")
    expect(lists.nth(0).locator(".answer[aria-pressed=true] .label")).to_have_text("dog")
    expect(page.locator(".readout").nth(0)).to_have_text("Coloured: evidence for dog")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download JSON").click()
    document = json.loads(Path(saved.value.path()).read_text())
    assert (document["classification"]["model"], document["beside"]["model"]) == (
        "english",
        "large",
    )
    small, large = document["maps"]
    assert (small["grid"], large["grid"]) == ([8, 8], [12, 12])
    target = f"model=large&method=relevance&class={large['class']}"
    answer = models_server.get(f"/attention?id={large['id']}&{target}&format=json")
    np.testing.assert_allclose(large["values"], answer.json()["values"], atol=1e-6)
    page.get_by_label("Second model").select_option("")
    expect(figures).to_have_count(1)
    map_shown(page)
    assert len(answers(page)) == 5


def test_each_model_shows_a_heic_as_it_saw(page: Page) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    buffer = io.BytesIO()
    with Image.open(DOG) as picture:
        pillow_heif.from_pillow(picture.resize((240, 320))).save(buffer, quality=70)
    page.get_by_label("Second model").select_option("large")
    choose(page, {"name": "IMG_2.HEIC", "mimeType": "image/heic", "buffer": buffer.getvalue()})
    expect(page.locator("#photo-caption")).to_contain_text("as the model saw it")
    for index, name in enumerate(("english", "large")):
        map_shown(page, index)
        assert pixels(page, f"figure[aria-label='Map of {name}'] .base")[..., :3].std() > 20


def test_a_refusal_is_told_beside_its_model(page: Page, models_server: Served) -> None:
    problem = {
        "type": "about:blank",
        "title": "Loading",
        "status": 503,
        "code": "model_loading",
        "detail": "so it is",
    }

    def refuse(name: str, route: Route) -> None:
        document = models_server.classify(
            DOG.read_bytes(), urlsplit(route.request.url).query
        ).json()
        document["models"][name] = {"error": problem | {"request_id": "r"}}
        route.fulfill(json=document)

    page.get_by_label("Second model").select_option("german")
    for refused, answered, alert in (
        ("german", "dog", ".refusal:visible"),
        ("english", "Hund", "#error"),
    ):
        page.route("**/classify?*", partial(refuse, refused), times=1)
        choose(page, DOG)
        expect(page.locator(alert)).to_contain_text("The model is being loaded")
        assert answers(page)[0] == answered
        expect(page.locator(".side:visible .answer")).to_have_count(5)
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".side:visible .answer")).to_have_count(10)
        expect(page.locator("#error:visible, .refusal:visible")).to_have_count(0)


def test_one_of_two_models_compares_words(page: Page) -> None:
    sent = queries(page)
    page.get_by_label("Second model").select_option("words")
    page.get_by_label("Possible labels").fill("a cat, dog")
    page.get_by_role("button", name="Use these").click()
    choose(page, DOG)
    expect(page.locator(".answer")).to_have_count(7)
    asked = sorted((query["model"], query["top_k"], query.get("labels")) for query in sent)
    assert asked[:2] == [("english", "5", None), ("words", "2", '["a cat","dog"]')]
    second = page.get_by_role("list", name="Classes by score, words").locator(".answer").nth(1)
    second.click()
    expect(page.locator(".readout").nth(1)).to_contain_text(
        f" for {second.locator('.label').inner_text()}"
    )
    map_shown(page, 1)
    assert (sent[-1]["path"], sent[-1]["model"], sent[-1]["labels"]) == (
        "/attention",
        "words",
        '["a cat","dog"]',
    )


def test_a_model_change_restarts_pictures(page: Page, found: Tab, models_server: Served) -> None:
    def put(**settings: object) -> None:
        body = {"checkpoint": BUNDLED.name} | settings
        assert models_server.client.put(
            "/models/passing", json=body, headers=ADMIN
        ).status_code in {200, 201}

    put()
    found.refusals_expected = True
    which = page.get_by_role("combobox", name="Model", exact=True)
    notice = page.locator("#notice[role=status]")
    which.select_option("passing")
    choose(page, DOG)
    map_shown(page)
    expect(notice).to_be_empty()
    put(image_size=48)  # the page learns it from /metrics
    expect(notice).to_have_text("The model has changed: the pictures are classified again.")
    expect(page.locator("#model")).to_contain_text("input 48\u00d748")
    map_shown(page)
    side_by_side(page, "german")
    page.route(
        "**/metrics", lambda route: route.abort()
    )  # so that a picture's request detects it first
    assert models_server.client.delete("/models/passing", headers=ADMIN).status_code == 204
    choose(page, CAT)
    expect(notice).to_have_text("passing no longer answers: the pictures are classified again.")
    expect(which).to_have_value("english")
    expect(page.get_by_label("Second model")).to_have_value("german")
    expect(page.locator("option", has_text="passing")).to_have_count(0)
    expect(page.locator("#pictures button[aria-label='dog.jpg: dog']")).to_have_count(1)
    for index in (0, 1):
        map_shown(page, index)


def test_a_model_during_the_start_is_listed(page: Page, models_server: Served) -> None:
    page.goto("about:blank")  # the open page asks for the models, too
    listed = models_server.get("/models").json()
    page.route("**/models", lambda route: route.fulfill(json=listed), times=1)
    body = {"checkpoint": BUNDLED.name}
    assert models_server.client.put("/models/late", json=body, headers=ADMIN).status_code == 201
    page.goto(models_server.url)  # its list of models is older than its first look at /metrics
    try:
        expect(page.locator("#first-model option", has_text="late")).to_have_count(1)
    finally:
        models_server.client.delete("/models/late", headers=ADMIN)


def test_axe_finds_nothing_with_two_models(page: Page) -> None:
    choose(page, DOG)
    map_shown(page)
    side_by_side(page, "german")
    open_choices(page, 1)
    page.get_by_text("The same request with curl").click()
    send_event(page, "drop", [CAT] * 3)
    expect(page.locator("tbody tr")).to_have_count(4)
    expect(page.locator("#progress-text")).to_have_text("3 of 3 answered")
    audit(page)
    require_no_overflow(page)
