"""The tab Teach in a real browser: add pictures, fit a head, try it, and correct mistakes."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model.checkpoint import BUNDLED
from tests.e2e.page.browser import Browser, Page, Tab, audit, expect, tab
from tests.e2e.page.conftest import serving
from tests.e2e.page.steps import (
    CAT,
    DOG,
    PHONE,
    Open,
    answers,
    choose,
    require_no_overflow,
    send_event,
)
from tests.e2e.serving import Served
from tests.launcher import until
from tests.model.images.pictures import encode

MODEL = "vit-cifar10"

pytestmark = pytest.mark.timeout(180)  # a server and a browser start


@pytest.fixture(scope="module")
def teaching(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the bundled model with teaching."""
    folder = tmp_path_factory.mktemp("teaching")
    with serving(
        folder, checkpoint="bundled", teach=folder / "taught", teach_thumbnails=True
    ) as served:
        yield served


@pytest.fixture(scope="module")
def keyed(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the bundled model with teaching, behind a key."""
    folder = tmp_path_factory.mktemp("keyed")
    options: dict[str, Any] = {"api_keys": "own", "admin_key": "admin", "metrics_public": True}
    with serving(folder, checkpoint="bundled", teach=folder / "taught", **options) as served:
        until(lambda: served.get("/readyz").status_code == 200)
        yield served


@pytest.fixture
def open_teaching(browser: Browser, teaching: Served) -> Open:
    return partial(tab, browser, f"{teaching.url}/")


@pytest.fixture
def found(open_teaching: Open) -> Iterator[Tab]:
    with open_teaching() as found:
        yield found


def parts(source: Path, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return pictures that are parts of one photograph."""
    with Image.open(source) as photo:
        side = min(photo.size) * 3 // 4
        random = np.random.default_rng(seed)
        found: list[dict[str, Any]] = []
        for number in range(count):
            left, top = (int(random.integers(0, length - side + 1)) for length in photo.size)
            file = encode(photo.crop((left, top, left + side, top + side)), "JPEG")
            found.append(
                {"name": f"{source.stem}-{number}.jpg", "mimeType": "image/jpeg", "buffer": file}
            )
        return found


def begin(page: Page, head: str) -> None:
    """Open the tab and name a head."""
    page.get_by_role("button", name="Teach", exact=True).click()
    page.locator("#head-name").fill(head)
    page.keyboard.press("Enter")


def give(page: Page, label: str, pictures: list[dict[str, Any]]) -> None:
    page.get_by_label("New label").fill(label)
    page.get_by_role("button", name="Add label").click()
    page.get_by_label(f"Pictures of {label}", exact=True).set_input_files(pictures)  # type: ignore[arg-type]


def learned(page: Page, count: int) -> None:
    """Wait until the head is fitted to `count` pictures."""
    expect(page.locator("#known")).to_have_text(re.compile(rf"^\d.* of {count} pictures right"))


def test_a_label_of_another_case_is_refused(found: Tab) -> None:
    page = found.page
    begin(page, "cases")
    for label in ("dog", "Dog"):
        page.get_by_label("New label").fill(label)
        page.get_by_role("button", name="Add label").click()
    expect(page.locator("#known")).to_contain_text("There is the label dog already")
    expect(page.locator("#labels-list li")).to_have_count(1)


def test_a_head_answers_once_it_has_pictures(open_teaching: Open) -> None:
    with open_teaching(**PHONE) as found:
        page = found.page
        begin(page, "pets")
        expect(page.locator("#intake")).to_be_hidden()
        give(page, "dog", parts(DOG, 6))
        give(page, "cat", parts(CAT, 6))
        learned(page, 12)
        expect(page.locator("#labels-list li").first).to_contain_text("6 pictures")
        expect(page.locator("#teach-progress-text")).to_have_text(
            re.compile(r"^(\d+) of \1 pictures sent$")
        )
        page.get_by_label("Picture to try").set_input_files(parts(DOG, 1, seed=9))  # type: ignore[arg-type]
        expect(page.locator("#tried")).to_have_text(re.compile(r"^dog-0\.jpg: dog >?\d+"))
        page.locator("#tryout summary").click()
        expect(page.locator("#head-curl")).to_contain_text("/classify?model=pets")
        audit(page)
        require_no_overflow(page)
        page.get_by_role("button", name="Try", exact=True).click()
        expect(page.locator("#intake")).to_be_visible()
        expect(page.locator("#teach")).to_be_hidden()


def test_a_key_sees_why_it_removes_nothing(browser: Browser, keyed: Served) -> None:
    with tab(browser, f"{keyed.url}/") as found:
        found.refusals_expected = True
        page = found.page
        page.locator("#key").fill("own")
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#tab-teach")).to_be_visible()
        begin(page, "keyed")
        wrong, *dogs = parts(DOG, 10, seed=1)
        give(page, "dog", dogs)
        give(page, "cat", [*parts(CAT, 8, seed=1), wrong | {"name": "wrong.jpg"}])
        learned(page, 18)
        suspect = page.locator("#suspects li").filter(has_text="wrong.jpg")
        expect(suspect).to_have_count(1)
        page.get_by_role("button", name="Remove: wrong.jpg").click()
        expect(page.locator("#not-mended")).to_have_text(re.compile("the admin key is needed"))
        page.get_by_role("button", name="It is dog: wrong.jpg").click()
        expect(page.locator("#not-mended")).to_be_hidden()
        expect(page.locator("#labels-list li").first).to_contain_text("10 pictures")
        expect(page.locator("#labels-list li").last).to_contain_text("8 pictures")
        expect(suspect).to_have_count(0)
        listed = keyed.get("/heads/keyed/examples", headers={"Authorization": "Bearer own"}).json()[
            "examples"
        ]
        assert sorted(each["label"] for each in listed) == ["cat"] * 8 + ["dog"] * 10


def test_a_reload_shows_the_kept_pictures(page: Page) -> None:
    begin(page, "kept")
    wrong, *dogs = parts(DOG, 10, seed=1)
    give(page, "dog", dogs)
    give(page, "cat", [*parts(CAT, 8, seed=1), wrong | {"name": "wrong.jpg"}])
    learned(page, 18)
    page.reload()
    page.get_by_role("button", name="Teach", exact=True).click()
    expect(page.locator("#head-name")).to_have_value("kept")
    suspect = page.locator("#suspects li").filter(has_text="wrong.jpg: cat, or rather dog?")
    expect(suspect).to_have_count(1)
    expect(suspect.locator("img")).to_have_attribute("src", re.compile("^data:image/jpeg"))


def test_a_refused_file_stays_listed(page: Page, found: Tab) -> None:
    found.refusals_expected = True
    begin(page, "broken")
    note: dict[str, Any] = {"name": "notes.txt", "mimeType": "", "buffer": b"no picture"}
    give(page, "dog", [*parts(DOG, 2), note])
    expect(page.locator("#labels-list .failed li")).to_have_text(
        re.compile("^notes.txt: This file is not a picture")
    )
    expect(page.locator("#labels-list li").first).to_contain_text("2 pictures")
    expect(page.locator("#known")).to_have_text(
        re.compile("^Not yet: needs at least two labels with two pictures each")
    )
    page.reload()
    begin(page, "broken")
    expect(page.locator("#labels-list li").first).to_contain_text("2 pictures")


def test_a_wrong_answer_becomes_an_example(page: Page, teaching: Served) -> None:
    choose(page, DOG)
    assert answers(page)
    page.get_by_text("Not right?").click()
    page.get_by_label("What is it?").fill("terrier")
    page.keyboard.press("Enter")
    expect(page.locator("#corrected")).to_have_text("mine has 1 picture of terrier now.")
    assert teaching.get("/heads/mine/examples").json()["examples"][0]["label"] == "terrier"


def test_a_new_head_uses_the_chosen_model(browser: Browser, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name, setting in (("english", ""), ("large", "image_size = 48")):
        (models / f"{name}.toml").write_text(f'checkpoint = "{BUNDLED}"\n{setting}\n')
    with serving(tmp_path, models=models, teach=tmp_path / "taught") as server:
        until(lambda: all(each["state"] == "ready" for each in server.get("/models").json()))
        with tab(browser, f"{server.url}/") as found:
            page = found.page
            page.locator("#first-model").select_option("large")
            choose(page, DOG)
            assert answers(page)
            page.get_by_text("Not right?").click()
            for count in ("1 picture", "2 pictures"):
                page.get_by_label("What is it?").fill("terrier")
                page.get_by_role("button", name="Teach it").click()
                expect(page.locator("#corrected")).to_have_text(f"mine has {count} of terrier now.")
                choose(page, CAT)
                expect(page.locator("#photo-caption")).to_have_text("cat.jpg")
            begin(page, "by-pictures")
            give(page, "cat", parts(CAT, 2))
            expect(page.locator("#labels-list li")).to_contain_text("2 pictures")
        assert [
            server.get(f"/heads/{head}").json()["model"] for head in ("mine", "by-pictures")
        ] == ["large", "large"]


def test_an_invalid_name_is_told_when_typed(page: Page) -> None:
    form = page.locator("#label-form")
    for name, told in (
        ("my pets", "1 to 128 of the characters"),
        ("", "1 to 128"),
        (MODEL, f"{MODEL} is the name of"),
    ):
        begin(page, name)
        expect(page.locator("#known")).to_contain_text(told)
        expect(form).to_be_hidden()
    page.get_by_role("button", name="Try", exact=True).click()
    choose(page, DOG)
    assert answers(page)
    page.get_by_text("Not right?").click()
    page.get_by_label("What is it?").fill("terrier")
    page.keyboard.press("Enter")
    expect(page.locator("#corrected")).to_contain_text(f"{MODEL} is the name of a model")
    begin(page, "good")
    expect(form).to_be_visible()
    expect(page.locator("#known")).to_contain_text("At least two labels with two pictures each")


def test_a_deleted_head_is_told_as_missing(page: Page, found: Tab, teaching: Served) -> None:
    found.refusals_expected = True
    begin(page, "short-lived")
    give(page, "dog", parts(DOG, 3))
    expect(page.locator("#labels-list li")).to_contain_text("3 pictures")
    assert teaching.client.delete("/heads/short-lived").status_code == 204
    page.locator("#head-name").dispatch_event("change")
    expect(page.locator("#known")).to_have_text("The service does not have this.")


def test_a_picture_can_be_dropped_on_a_label(page: Page) -> None:
    expect(page.locator("#tab-teach")).to_be_visible()
    page.locator("#tab-teach").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.locator("#head-name").fill("by-keyboard")
    page.keyboard.press("Enter")
    page.get_by_label("New label").focus()
    page.keyboard.type("dropped")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Add pictures of dropped")).to_be_focused()
    send_event(page, "drop", [DOG, CAT], "#labels-list li")
    expect(page.locator("#labels-list li").first).to_contain_text("2 pictures")


def test_without_a_folder_there_is_no_tab(open_page: Open) -> None:
    with open_page() as found:
        page = found.page
        choose(page, DOG)
        assert answers(page)
        expect(page.locator("#tabs")).to_be_hidden()
        expect(page.get_by_text("Not right?")).to_be_hidden()
