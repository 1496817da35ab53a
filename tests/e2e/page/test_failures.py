"""The page when requests fail, wait or are cancelled."""

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.page.browser import Page, Tab, expect
from tests.e2e.page.steps import (
    CAT,
    DOG,
    answers,
    choose,
    map_shown,
    open_choices,
    send_event,
)

pytestmark = pytest.mark.timeout(180)  # a server and a browser start


def test_proxy_errors_get_plain_words(page: Page, found: Tab) -> None:
    told = {
        413: "larger than the service accepts",
        429: "too much work",
        502: "not ready yet",
        504: "too busy to answer in time",
        500: "could not answer",
        200: "could not answer",  # such as a sign-in page
    }

    def answer(route):
        [status] = map(int, re.findall(rb'filename="(\d+)', route.request.post_data_buffer))
        route.fulfill(
            status=status,
            body="<html>nginx",
            content_type="text/html",
            headers={"Retry-After": "0.01"},
        )

    found.refusals_expected = True
    page.route("**/classify?*", answer)
    for status, words in told.items():
        choose(page, {"name": f"{status}.jpg", "mimeType": "", "buffer": DOG.read_bytes()})
        expect(page.locator("#photo-caption")).to_have_text(f"{status}.jpg")
        expect(page.get_by_role("alert")).to_contain_text(words)
        expect(page.get_by_role("alert")).not_to_contain_text("nginx")


def test_a_failed_picture_can_be_tried_again(page: Page, found: Tab, tmp_path: Path) -> None:
    found.refusals_expected = True
    page.route("**/classify?*", lambda route: route.abort())
    page.route("**/metrics", lambda route: route.abort())
    choose(page, DOG)
    expect(page.get_by_role("alert")).to_contain_text("The service does not answer")
    expect(page.locator("#live-note")).to_have_text("the service does not answer")
    page.unroute("**/classify?*")
    page.get_by_role("button", name="Try again").click()
    assert answers(page)[0] == "dog"
    expect(page.get_by_role("button", name="Try again")).to_be_hidden()
    (tmp_path / "gone.jpg").write_bytes(DOG.read_bytes())

    def change_file_and_send(route):
        (tmp_path / "gone.jpg").unlink()
        route.abort()

    page.route("**/classify?*", change_file_and_send)
    choose(page, tmp_path / "gone.jpg")
    expect(page.locator("#photo-caption")).to_have_text("gone.jpg")
    expect(page.get_by_role("alert")).to_contain_text("cannot be read")
    # Everything of the previous picture is gone.
    expect(page.locator("#save-png")).to_be_disabled()
    expect(page.locator(".class")).to_have_value("")


def test_the_maps_under_way_are_cancelled(page: Page, found: Tab) -> None:
    found.refusals_expected = True
    choose(page, DOG)
    map_shown(page)
    expect(page.locator("#cancel")).to_be_disabled()
    page.route("**/attention?*", lambda route: None)  # never answered
    with page.expect_request("**/attention?*") as asked:
        open_choices(page)
        page.locator(".method").select_option("gae")
    # The browser reports a request's end asynchronously, so the test waits.
    with page.expect_event("requestfailed", lambda request: request == asked.value) as ended:
        page.locator("#cancel").click()
    assert ended.value.failure == "net::ERR_ABORTED"
    expect(page.locator(".map-note")).to_have_text("Cancelled.")
    expect(page.locator("#cancel")).to_be_disabled()
    page.unroute("**/attention?*")
    page.get_by_role("button", name="Try again").click()
    map_shown(page)
    expect(page.locator("#curl-text")).to_contain_text("gae")


def test_unsent_pictures_can_be_cancelled(page: Page) -> None:
    page.route("**/classify?*", lambda route: None)  # never answered
    page.route("**/labels", lambda route: None)  # no answer waits for it
    page.reload()
    send_event(page, "drop", [DOG] * 6)
    expect(page.locator("#progress-text")).to_have_text("0 of 6 answered")
    cancel = page.locator("#cancel").bounding_box()
    assert cancel is not None and cancel["height"] < 45  # its word on one line
    page.locator("#cancel").click()
    expect(page.locator("#progress-text")).to_have_text("0 of 6 answered, 6 cancelled")
    expect(page.locator("#cancel")).to_be_disabled()
    page.unroute("**/classify?*")
    choose(page, DOG)
    assert answers(page)[0] == "dog"


def test_a_refusal_is_told_in_plain_words(page: Page, found: Tab) -> None:
    refused = [
        ("notes.txt", b"no picture", "This file is not a picture."),
        ("IMG_1.dat", bytes(64), "not a picture of an allowed format"),
        ("DSC_1.orf", b"IIRO\x08\0", "Raw photos"),
        ("IMG_1.HEIC", b"no picture", "Most Compatible"),
        ("cut.jpg", DOG.read_bytes()[:20_000], "damaged or incomplete"),
        ("big.jpg", bytes(300_000), "larger than the service accepts"),
    ]
    found.refusals_expected = True
    for name, content, words in refused:
        choose(page, {"name": name, "mimeType": "", "buffer": content})
        expect(page.get_by_role("alert")).to_contain_text(words)
        expect(page.get_by_role("alert")).to_contain_text(
            "request "
        )  # the id that finds it in the logs
        expect(page.locator("#progress-text")).to_have_text("0 of 1 answered, 1 cannot be read")
        expect(page.locator("button:visible", has_text="Try again")).to_have_count(0)


def test_a_busy_service_is_asked_again(page: Page, found: Tab) -> None:
    busy = {"/model": "engine_unavailable", "/classify": "queue_full", "/attention": "queue_full"}

    def refuse(route):
        code = busy.get(urlsplit(route.request.url).path)
        if code is None:
            return route.fallback()
        problem = {"code": code, "detail": "", "status": 503}
        headers = {"Retry-After": "0.02", "Content-Type": "application/problem+json"}
        return route.fulfill(status=503, headers=headers, body=json.dumps(problem))

    def refuse_once(route):
        refuse(route)
        busy.pop(urlsplit(route.request.url).path)

    found.refusals_expected = True
    page.route(re.compile(r"/model\?"), refuse)
    page.reload()
    choose(page, CAT)
    expect(page.get_by_role("alert")).to_contain_text("The model is not ready yet")
    expect(page.locator("#progress-text")).to_have_text("Waiting for the service")
    expect(page.locator("select:visible")).to_have_count(0)
    busy.pop("/model")
    assert answers(page)  # from the waiting picture
    expect(page.get_by_role("alert")).to_be_hidden()
    page.route("**/classify?*", refuse_once, times=1)
    page.route("**/attention?*", refuse_once, times=1)
    choose(page, DOG)
    assert answers(page)[0] == "dog"
    map_shown(page)
    open_choices(page)
    page.locator(".method").select_option("rollout")
    map_shown(page)
    expect(page.locator("#curl-text")).to_contain_text("rollout")
    assert busy == {}
