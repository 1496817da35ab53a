"""The page in a real browser, with the bundled model, DeiT-tiny and real pictures."""

import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.e2e.page.browser import Browser, Page, Route, Tab, expect, tab
from tests.e2e.page.steps import (
    CAT,
    DOG,
    PHONE,
    Open,
    answers,
    choose,
    map_shown,
    open_choices,
    pixels,
    send_event,
)
from tests.e2e.serving import Served

pytestmark = pytest.mark.timeout(180)  # a server and a browser start


def test_an_example_answer_moves_no_element(page: Page, server: Served) -> None:
    model = server.get("/model").json()
    expect(page.locator("#model")).to_have_text(
        f"{model['name']} on {model['device']}, {model['dtype']}, input 32\u00d732, 10 classes"
    )
    assert page.evaluate("shifts.flat()") == []
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/classify?*", hold)
    page.get_by_role("button", name="Example: a dog with a party hat").click()
    expect(page.locator("#progress-text")).to_have_text("0 of 1 answered")
    expect(page.locator("#photo-caption")).to_have_text("dog.jpg")
    # Space is reserved, so an answer moves no element.
    page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
    page.evaluate("shifts.length = 0")
    expect(page.locator("#headline")).to_have_text("Looking …")
    expect(page.locator("figure.map")).to_have_attribute("aria-busy", "true")
    held[0].continue_()
    assert answers(page)[0] == "dog"
    assert len(answers(page)) == 5
    expect(page.locator(".answer .score").first).to_have_text(re.compile(r"^9\d(\.\d)? %$"))
    map_shown(page)
    heat = pixels(page, ".heat")
    assert heat[..., 3].max() > 200  # the strongest patch
    assert (heat[..., 3] == 0).mean() > 0.2  # the photo stays clear below the even share
    expect(page.locator("#progress-text")).to_have_text("1 of 1 answered")
    assert page.evaluate("shifts.flat()") == []


@pytest.mark.parametrize("options", [{}, PHONE], ids=["desktop", "phone"])
def test_an_empty_page_asks_for_pictures(open_page: Open, options: dict[str, object]) -> None:
    with open_page(**options) as found:
        page = found.page
        first = "Take a photo" if options else "Choose pictures"
        expect(page.locator("#drop button:visible").first).to_have_text(first)
        expect(page.locator("#live")).to_be_hidden()  # the figures are not loaded yet
        expect(page.locator("select:visible, canvas:visible, progress:visible")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollHeight - innerHeight") <= 0
        choose(page, DOG)
        map_shown(page)
        expect(page.get_by_text("Click an answer to see the evidence for it.")).to_be_visible()
        expect(page.locator("select:visible")).to_have_count(1)


def test_pictures_come_in_every_way(open_page: Open) -> None:
    with open_page(**PHONE) as found:
        page = found.page
        expect(page.get_by_text("Drop pictures here")).to_be_hidden()
        choose(page, CAT)
        assert answers(page)
        expect(page.locator("#photo-caption")).to_have_text("cat.jpg")
        expect(page.get_by_role("button", name="Take a photo")).to_be_visible()
        assert page.locator("#camera").get_attribute("capture") == "environment"
        page.locator("#camera").set_input_files(DOG)
        expect(page.locator("#photo-caption")).to_have_text("dog.jpg")
        for number, way in enumerate(("drop", "paste"), start=3):
            send_event(page, way, [CAT])
            expect(page.locator("#pictures button, tbody tr")).to_have_count(number)
            expect(page.locator("#progress-text")).to_have_text(
                re.compile(r"^(\d) of \1 answered$")
            )
            expect(page.locator("#photo-caption")).to_have_text("cat.jpg")
        # Every element fits a small phone's width.
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_many_pictures_are_a_table(page: Page, found: Tab) -> None:
    found.refusals_expected = True
    send_event(page, "drop", [CAT, DOG] * 5)
    late: dict[str, object] = {"name": "late.jpg", "mimeType": "", "buffer": DOG.read_bytes()}
    choose(page, {"name": "=notes, old.txt", "mimeType": "", "buffer": b"no picture"}, late)
    expect(page.locator("tr.failed")).to_have_count(1)
    rows = page.locator("tbody tr")
    expect(rows.nth(9)).to_contain_text("dog.jpgdog9")
    expect(page.locator("#photo-caption")).to_have_text("late.jpg")  # the first answered picture
    expect(page.locator("th[aria-sort]:not([aria-sort=none])")).to_have_count(
        0
    )  # in the order of their arrival
    page.locator("th button[data-by=name]").click()
    expect(rows.nth(4)).to_contain_text("cat.jpg")
    page.locator("th button[data-by=score]").click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("Score")
    page.locator("th button[data-by=label]").focus()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.locator("tr:focus")).to_have_attribute(
        "aria-selected", "true"
    )  # one stop for all rows
    page.keyboard.press("End")
    expect(rows.last).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(rows.nth(10)).to_have_attribute("aria-selected", "true")
    expect(rows.nth(10)).to_be_in_viewport(ratio=1)
    page.get_by_label("Filter").fill("dog")
    expect(rows).to_have_count(6)
    page.get_by_label("Filter").fill("")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download CSV").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == "file,label,score,abstained,error"
    assert re.match(r"cat\.jpg,cat,0\.99", lines[1])
    assert lines[-1].startswith('"\'=notes, old.txt",,,,')
    rows.nth(9).focus()
    page.keyboard.press("Delete")
    expect(rows).to_have_count(11)
    page.get_by_role("button", name="Remove", exact=True).click()
    expect(rows).to_have_count(10)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("tbody tr, #where:visible, #answer:visible")).to_have_count(0)


def test_another_model_starts_pictures_again(page: Page, server: Served) -> None:
    model = server.get("/model").json()
    answer = server.classify(DOG.read_bytes(), "attention=relevance").json()
    choose(page, DOG)
    map_shown(page)
    page.route(re.compile(r"/model\?"), lambda route: route.fulfill(json=model | {"name": "other"}))
    answer |= {"model": "other", "predictions": [{"label": "loaf", "index": 7, "score": 0.9}]}
    answer["attention"] |= {"label": "loaf", "class": 7}
    page.route("**/classify?*", lambda route: route.fulfill(json=answer))
    page.route(
        "**/labels", lambda route: route.fulfill(json={"model": "other", "labels": ["loaf"] * 10})
    )
    choose(page, CAT)
    expect(page.locator("#notice")).to_contain_text("The model has changed")
    expect(page.locator("#model")).to_contain_text("other on")
    expect(page.locator("#pictures button[aria-label$=': loaf']")).to_have_count(2)
    map_shown(page)
    # A map of another model, whose change the page has not noticed.
    page.unroute(re.compile(r"/model\?"))
    page.unroute("**/classify?*")
    page.evaluate("document.querySelector('#notice').textContent = ''")
    map_of_other = answer["attention"] | {"label": "pie", "class": 3}
    page.route("**/attention?*", lambda route: route.fulfill(json=map_of_other))
    open_choices(page)
    page.locator(".class").fill("loaf (3)")
    expect(page.locator("#notice")).to_contain_text("The model has changed")
    expect(page.locator("#pictures button[aria-label='dog.jpg: dog']")).to_have_count(1)


def test_a_model_of_words_asks_for_labels(page: Page, server: Served) -> None:
    model = server.get("/model").json()
    answer = server.classify(DOG.read_bytes()).json()
    described = model | {"classes": 0, "templates": ["a photo of {}."], "attention_methods": []}
    page.route(re.compile(r"/model\?"), lambda route: route.fulfill(json=described))
    page.route("**/classify?*", lambda route: route.fulfill(json=answer))
    page.reload()
    expect(page.locator("#knows")).to_contain_text("labels of your own")
    page.get_by_label("Possible labels").fill("a party hat, dog,")
    with page.expect_request("**/classify?*") as sent:
        page.get_by_role("button", name="Use these").click()
        choose(page, DOG)
    assert parse_qs(urlsplit(sent.value.url).query)["labels"] == ['["a party hat","dog"]']
    assert answers(page)[0] == "dog"
    assert pixels(page, ".map .base")[..., :3].std() > 20
    expect(page.locator(".hold:visible, .choices:visible, #more:visible")).to_have_count(0)


def test_the_load_is_shown(open_page: Open) -> None:
    with open_page(own_profile=True) as found:
        page = found.page
        # A restarted service counts from zero.
        page.route("**/metrics", lambda route: route.fulfill(body="vit_images_total 100000\n"))
        page.clock.install()
        with page.expect_response("**/metrics"):
            page.reload()
        expect(page.locator("#live-queue")).to_have_text("\u2013")
        page.unroute("**/metrics")
        choose(page, DOG)
        assert answers(page)
        for _ in range(2):
            with page.expect_response("**/metrics"):
                page.clock.run_for(2000)
        expect(page.locator("#live-rate")).to_have_text("0.0")
        choose(page, DOG)
        expect(page.locator("#progress-text")).to_have_text("1 of 1 answered")
        expect(page.locator("#pictures .mark").last).to_be_empty()
        page.clock.run_for(2000)
        expect(page.locator("#live-rate")).to_have_text(re.compile(r"^0\.[1-9]|^[1-9]"))
        expect(page.locator("#live-batch")).to_have_text(re.compile(r"^\d+\.\d$"))
        expect(page.locator("#live-p50")).to_have_text(re.compile(r"^\d+(\.\d+)? ms$"))
        expect(page.locator("#live-queue")).to_have_text("0")


def test_it_works_behind_a_prefix(browser: Browser, server: Served) -> None:
    with tab(browser, "about:blank") as found:
        found.origin = server.url
        page = found.page
        page.route(
            f"{server.url}/**",
            lambda route: route.fulfill(
                status=404, body="outside the prefix", content_type="text/plain"
            ),
        )
        page.route(
            f"{server.url}/vision/**",
            lambda route: route.continue_(url=route.request.url.replace("/vision/", "/", 1)),
        )
        page.goto(f"{server.url}/vision/")
        page.get_by_role("button", name="Example: a cat").click()
        assert answers(page)
        map_shown(page)
        expect(page.locator("#curl-text")).to_contain_text("/vision/classify?top_k=5")


def test_deit_tiny_behind_a_key(browser: Browser, locked_server: Served) -> None:
    with tab(browser, f"{locked_server.url}/") as found:
        found.refusals_expected = True
        page = found.page
        choose(page, DOG)  # it waits for the key
        expect(page.get_by_label("API key")).to_be_focused()
        expect(page.locator("button:visible")).to_have_text(["Use this key"])
        expect(page.locator("main > :visible")).to_have_count(1)
        expect(page.locator("footer")).to_be_hidden()
        for wrong in ("wrong", "\u043a\u043b\u044e\u0447"):  # the second cannot even be sent
            page.get_by_label("API key").fill(wrong)
            page.get_by_role("button", name="Use this key").click()
            expect(page.locator("#key-note")).to_have_text("The service does not know this key.")
            expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("secret")  # over the wrong key, which is selected
        page.keyboard.press("Enter")
        assert answers(page)[0] == "Tibetan terrier, chrysanthemum dog"
        expect(page.locator("#key-form")).to_be_hidden()
        map_shown(page)
        assert "$VIT_API_KEY" in (page.locator("#curl-text").text_content() or "")
        assert "secret" not in page.content()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [
            0,
            0,
            "",
        ]
        page.reload()
        expect(page.get_by_label("API key")).to_be_visible()
