"""The page for screen readers, the keyboard and phones."""

import re

import pytest

from tests.e2e.page.browser import Page, audit, expect
from tests.e2e.page.steps import (
    CAT,
    DOG,
    PHONE,
    Open,
    answers,
    choose,
    map_shown,
    open_choices,
    send_event,
)
from tests.e2e.serving import Served

pytestmark = pytest.mark.timeout(180)  # a server and a browser start


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_on_a_phone_the_map_is_in_sight(open_page: Open, motion: str) -> None:
    with open_page(**PHONE, reduced_motion=motion) as found:
        page = found.page
        choose(page, DOG)
        map_shown(page)
        expect(page.locator(".map .stage")).to_be_in_viewport(ratio=1)
        row = page.locator(".answer").nth(4)
        row.scroll_into_view_if_needed()
        row.click()
        expect(page.locator(".map .stage")).to_be_in_viewport(ratio=1)
        smooth = page.evaluate("getComputedStyle(document.documentElement).scrollBehavior")
        assert smooth == ("auto" if motion == "reduce" else "smooth")


def test_screen_readers_hear_each_outcome(page: Page) -> None:
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.setData("text/plain", "https://example.org/cat.jpg");
          const paste = new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
          document.body.dispatchEvent(paste);
        }"""
    )
    expect(page.get_by_role("status").filter(has_text="This is a URL")).to_be_visible()
    expect(page.locator("#knows")).to_have_text(
        re.compile("^This model knows: airplane, automobile, ")
    )
    choose(page, DOG)
    expect(page.locator("#said[role=status]")).to_have_text(re.compile(r"^dog\.jpg: dog, 9\d"))


@pytest.mark.parametrize("options", [{}, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing(open_page: Open, options: dict[str, object]) -> None:
    with open_page(**options) as found:
        page = found.page
        if not options:
            audit(page)
        choose(page, DOG)
        map_shown(page)
        page.get_by_label("Compare two maps").check()
        map_shown(page, 1)
        page.get_by_text("The same request with curl").click()
        open_choices(page)
        send_event(page, "drop", [CAT] * 3)
        expect(page.locator("tbody tr")).to_have_count(4)
        audit(page)


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.get_by_role("button", name="Choose pictures").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the first example
    assert answers(page)[0] == "dog"
    map_shown(page)
    reached = set()
    for _ in range(28):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {
        "stack",
        "hold",
        "answer",
        "top-k",
        "opacity",
        "smooth",
        "compare",
        "save-png",
        "save-json",
    } <= reached


def test_labels_stay_readable_on_a_phone(open_page: Open, server: Served) -> None:
    sets = [
        {"set": ["<i>", "Aufgabe" * 50], "set_size": 2},
        {"set": [], "set_size": 0, "abstained": True},
    ]
    sets += [{"set": ["dog"], "set_size": 1}, {"set_size": 140}, {}]

    def lengthen(route):
        document = server.classify(DOG.read_bytes()).json()
        document["predictions"][0]["label"] = (
            "Rindfleischetikettierungsüberwachungsaufgabenübertragungsgesetz, " * 5
        )
        document["predictions"][1]["label"] = "<b>x</b>"
        route.fulfill(json=document | sets[0])

    with open_page(**PHONE) as found:
        page = found.page
        page.route("**/classify?*", lengthen)
        choose(page, DOG)
        assert answers(page)[1] == "<b>x</b>"  # labels are text, never markup
        expect(page.locator("#fits")).to_have_text(
            re.compile("^2 labels fit: <i>; (Aufgabe){50}\\.$")
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.locator(".answer .score").first.scroll_into_view_if_needed()
        expect(page.locator(".answer .score").first).to_be_in_viewport(ratio=1)
        for text in (
            "None of its labels fits.",
            "One label fits: dog.",
            "140 labels fit.",
            None,
        ):
            sets.pop(0)
            choose(page, DOG)
            expect(page.locator("#fits")).to_have_text(text) if text else expect(
                page.locator("#fits")
            ).to_be_hidden()
