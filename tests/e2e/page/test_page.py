"""The page at / in a real browser, with the bundled model and real pictures."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.e2e.page.browser import Browser, Page, Tab, chromium, expect, tab
from tests.e2e.serving import Serve, Served

pytestmark = pytest.mark.timeout(90)  # a server and a browser start

Open = Callable[..., AbstractContextManager[Tab]]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DOG, HARBOUR = EXAMPLES / "dog.jpg", EXAMPLES / "harbour.jpg"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server(browser: Browser, serve_module: Serve) -> Served:
    """Serves the bundled model."""
    return serve_module(checkpoint="bundled", backend="torch", max_upload_bytes="200kB")


@pytest.fixture(scope="module")
def open_page(browser: Browser, server: Served) -> Open:
    return partial(tab, browser, f"{server.url}/")


def answers(page: Page) -> list[str]:
    """The labels on screen, when they are there."""
    expect(page.locator(".answer").first).to_be_visible()
    return page.locator(".answer .label").all_inner_texts()


def choose(page: Page, *files: Path | dict[str, object]) -> None:
    page.locator("#files").set_input_files(list(files))  # type: ignore[arg-type]


def map_shown(page: Page, index: int = 0) -> None:
    """Wait for a map."""
    expect(page.locator(".map .readout").nth(index)).to_contain_text("Strongest")
    expect(page.locator("figure.map").nth(index)).not_to_have_attribute("aria-busy", "true")


def pixels(page: Page, selector: str) -> np.ndarray:
    """The pixels of a canvas: uint8 [rows, columns, 4]."""
    url = page.locator(selector).first.evaluate("(canvas) => canvas.toDataURL('image/png')")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGBA"))


def send_event(page: Page, kind: str, files: list[Path]) -> None:
    """Drop or paste files as a person would: the event with its data."""
    content = [[path.name, base64.b64encode(path.read_bytes()).decode()] for path in files]
    page.evaluate(
        """([kind, files]) => {
          const data = new DataTransfer();
          for (const [name, text] of files) {
            const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
            data.items.add(new File([bytes], name, { type: "image/jpeg" }));
          }
          const options = { bubbles: true, cancelable: true };
          document.querySelector("#drop").dispatchEvent(kind === "paste"
            ? new ClipboardEvent("paste", { ...options, clipboardData: data })
            : new DragEvent("drop", { ...options, dataTransfer: data }));
        }""",
        [kind, content],
    )


def test_an_example_is_answered_with_bars_and_a_map_and_nothing_moves(open_page: Open, server: Served) -> None:
    model = server.get("/model").json()
    with open_page() as found:
        page = found.page
        expect(page.locator("#model")).to_have_text(
            f"{model['name']} on {model['device']}, {model['dtype']}, input 32\u00d732, 10 classes"
        )
        page.get_by_role("button", name="Example: a dog with a party hat").click()
        assert answers(page)[0] == "dog"
        assert len(answers(page)) == 5
        expect(page.locator(".answer .score").first).to_have_text(re.compile(r"^9\d(\.\d)? %$"))
        map_shown(page)
        heat = pixels(page, ".heat")
        assert heat[..., 3].max() > 200  # the strongest patch
        assert (heat[..., 3] == 0).mean() > 0.2  # the photo stays clear where there is less than the even share
        expect(page.locator("#progress-text")).to_have_text("1 of 1 done")
        assert page.evaluate("shifts.flat()") == []


def test_pictures_come_in_every_way(open_page: Open) -> None:
    with open_page(**PHONE) as found:
        page = found.page
        choose(page, HARBOUR)
        assert answers(page)
        expect(page.locator("#photo-caption")).to_have_text("harbour.jpg")
        expect(page.get_by_role("button", name="Take a photo")).to_be_visible()
        assert page.locator("#camera").get_attribute("capture") == "environment"
        page.locator("#camera").set_input_files(DOG)
        expect(page.locator("#photo-caption")).to_have_text("dog.jpg")
        for number, way in enumerate(("drop", "paste"), start=3):
            send_event(page, way, [HARBOUR])
            expect(page.locator("#pictures button")).to_have_count(number)
            expect(page.locator("#pictures .mark").last).to_be_empty()
            assert answers(page)
        # Nothing is wider than a small phone.
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_several_pictures_are_answered_each_and_can_be_looked_at(open_page: Open) -> None:
    with open_page() as found:
        page = found.page
        send_event(page, "drop", [HARBOUR, DOG, HARBOUR])
        expect(page.locator("#progress-text")).to_have_text("3 of 3 done")
        thumbnails = page.locator("#pictures button")
        expect(thumbnails).to_have_count(3)
        thumbnails.nth(1).click()
        expect(page.locator("#photo-caption")).to_have_text("dog.jpg")
        expect(thumbnails.nth(1)).to_have_attribute("aria-current", "true")
        assert answers(page)[0] == "dog"
        expect(thumbnails.nth(1)).to_have_attribute("aria-label", "dog.jpg: dog")


def test_what_was_not_sent_yet_can_be_cancelled(open_page: Open) -> None:
    with open_page() as found:
        page = found.page
        page.route("**/classify?*", lambda route: None)  # never answered
        send_event(page, "drop", [DOG] * 6)
        expect(page.locator("#progress-text")).to_have_text("0 of 6 done")
        page.locator("#cancel").click()
        expect(page.locator("#progress-text")).to_have_text("6 of 6 done, 6 cancelled")
        expect(page.locator("#cancel")).to_be_disabled()
        page.unroute("**/classify?*")
        choose(page, DOG)
        assert answers(page)[0] == "dog"


def test_a_refusal_is_told_in_plain_words(open_page: Open) -> None:
    refused = [
        ("notes.txt", b"no picture", "not a picture of a kind"),
        ("IMG_1.HEIC", b"no picture", "Most Compatible"),
        ("cut.jpg", DOG.read_bytes()[:20_000], "damaged or incomplete"),
        ("big.jpg", bytes(300_000), "larger than the service accepts"),
    ]
    with open_page() as found:
        found.refusals_expected = True
        for name, content, words in refused:
            choose(found.page, {"name": name, "mimeType": "", "buffer": content})
            expect(found.page.get_by_role("alert")).to_contain_text(words)
            expect(found.page.get_by_role("alert")).to_contain_text("request ")  # to find it in the logs
            expect(found.page.locator("#progress-text")).to_have_text("1 of 1 done, 1 failed")


def test_a_busy_service_is_asked_again(open_page: Open) -> None:
    refused: list[bool] = []

    def refuse_once(route):
        if refused:
            return route.fallback()
        refused.append(True)
        problem = {"code": "queue_full", "detail": "", "status": 503}
        headers = {"Retry-After": "1", "Content-Type": "application/problem+json"}
        return route.fulfill(status=503, headers=headers, body=json.dumps(problem))

    with open_page() as found:
        found.refusals_expected = True
        found.page.route("**/classify?*", refuse_once)
        choose(found.page, DOG)
        assert answers(found.page)[0] == "dog"


def test_a_heic_picture_is_shown_as_the_model_saw_it(open_page: Open) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    buffer = io.BytesIO()
    with Image.open(DOG) as picture:
        pillow_heif.from_pillow(picture.resize((240, 320))).save(buffer, quality=70)
    with open_page() as found:
        choose(found.page, {"name": "IMG_2.HEIC", "mimeType": "image/heic", "buffer": buffer.getvalue()})
        assert answers(found.page)[0] == "dog"
        expect(found.page.locator("#photo-caption")).to_contain_text("as the model saw it")
        map_shown(found.page)
        assert pixels(found.page, ".photo .base")[..., :3].std() > 20


def test_layer_and_head_are_switched_and_two_maps_stand_side_by_side(open_page: Open, server: Served) -> None:
    with open_page() as found:
        page = found.page
        choose(page, DOG)
        map_shown(page)
        page.locator(".method").select_option("cls")
        before = pixels(page, ".heat")
        page.locator(".layer").select_option("1")
        page.locator(".head").select_option("2")
        expect(page.locator("#curl-text")).to_contain_text("layer=1&head=2")
        map_shown(page)
        assert (pixels(page, ".heat") != before).any()
        page.get_by_label("Compare two maps").check()
        expect(page.locator("figure.map")).to_have_count(2)
        map_shown(page, 1)
        page.locator("figure.map").nth(1).locator(".head").select_option("max")
        with page.expect_download() as saved:
            page.get_by_role("button", name="Download JSON").click()
        document = json.loads(Path(saved.value.path()).read_text())
        assert document["classification"]["predictions"][0]["label"] == "dog"
        [first, second] = document["maps"]
        assert [(found["layer"], found["head"]) for found in (first, second)] == [(1, 2), (1, "max")]
        query = f"/attention?id={first['id']}&method=cls&layer=1&head=2&format=json"
        np.testing.assert_allclose(first["values"], server.get(query).json()["values"], atol=1e-6)
        with page.expect_download() as saved:
            page.get_by_role("button", name="Download PNG").click()
        assert saved.value.suggested_filename == "dog-map.png"
        with Image.open(saved.value.path()) as picture:
            assert picture.width > picture.height
        page.get_by_label("Compare two maps").uncheck()
        expect(page.locator("figure.map")).to_have_count(1)


def test_opacity_and_patches(open_page: Open) -> None:
    with open_page() as found:
        page = found.page
        choose(page, DOG)
        map_shown(page)
        smooth = pixels(page, ".heat")
        page.get_by_label("Smooth").uncheck()
        squares = pixels(page, ".heat")
        assert len(np.unique(squares[..., 3])) <= 64 < len(np.unique(smooth[..., 3]))
        page.get_by_label("Opacity of the map").fill("25")
        expect(page.locator(".heat")).to_have_css("opacity", "0.25")


def test_a_patch_tells_its_share_to_pointer_and_keyboard(open_page: Open, server: Served) -> None:
    with open_page() as found:
        page = found.page
        choose(page, DOG)
        map_shown(page)
        box = page.locator(".map .stack").bounding_box()
        assert box is not None
        with page.expect_download() as saved:
            page.get_by_role("button", name="Download JSON").click()
        [shown] = json.loads(Path(saved.value.path()).read_text())["maps"]
        values = np.array(shown["values"])
        region = shown.get("region")
        with Image.open(DOG) as picture:
            width, height = picture.size
        left, top, across, down = (
            (region["x"] / width, region["y"] / height, region["width"] / width, region["height"] / height)
            if region
            else (0, 0, 1, 1)
        )

        def told(row: int, column: int) -> re.Pattern[str]:
            share = 100 * values[row, column] / values.sum()
            return re.compile(rf"Row {row + 1}, column {column + 1}: {re.escape(f'{share:.3g}')}\d* %")

        x = box["x"] + box["width"] * (left + across * 2.5 / 8)
        page.mouse.move(x, box["y"] + box["height"] * (top + down * 3.5 / 8))
        readout = page.locator(".readout")
        expect(readout).to_have_text(told(3, 2))
        expect(page.locator(".patch")).to_be_visible()
        page.mouse.move(1, 1)
        expect(page.locator(".patch")).to_be_hidden()
        page.get_by_label("Compare two maps").focus()
        page.keyboard.press("Tab")
        row, column = divmod(int(values.argmax()), 8)
        expect(readout).to_have_text(told(row, column))
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowLeft")
        expect(readout).to_have_text(told(min(7, row + 1), max(0, column - 1)))


def test_the_curl_calls_give_what_is_on_screen(open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "a dog, 'small'.jpg").write_bytes(DOG.read_bytes())
    with open_page() as found:
        page = found.page
        choose(page, tmp_path / "a dog, 'small'.jpg")
        labels = answers(page)
        map_shown(page)
        page.get_by_text("The same with curl").click()
        classify, attention = page.locator("#curl-text").inner_text().splitlines()
        run = partial(subprocess.run, cwd=tmp_path, capture_output=True, check=True, timeout=20)
        answer = json.loads(run([*shlex.split(classify), "--silent", "--noproxy", "*"]).stdout)
        assert [found["label"] for found in answer["predictions"]] == labels
        run([*shlex.split(attention), "--silent", "--fail", "--noproxy", "*"])
        with Image.open(tmp_path / "map.png") as drawn:
            assert drawn.format == "PNG"


def test_more_answers_can_be_asked_for(open_page: Open) -> None:
    with open_page() as found:
        choose(found.page, DOG)
        assert len(answers(found.page)) == 5
        found.page.locator("#top-k").select_option("10")
        expect(found.page.locator(".answer")).to_have_count(10)


def test_the_load_is_shown(open_page: Open) -> None:
    with open_page() as found:
        page = found.page
        expect(page.locator("#live-queue")).to_have_text("\u2013")
        choose(page, DOG)
        expect(page.locator("#live-rate")).to_have_text(re.compile(r"^0\.[1-9]|^[1-9]"))
        expect(page.locator("#live-batch")).to_have_text(re.compile(r"^\d+\.\d$"))
        expect(page.locator("#live-p50")).to_have_text(re.compile(r"^\d+(\.\d+)? ms$"))
        expect(page.locator("#live-queue")).to_have_text("0")


@pytest.mark.parametrize("options", [{}, PHONE, {"color_scheme": "dark"}], ids=["desktop", "phone", "dark"])
def test_axe_finds_nothing(open_page: Open, options: dict[str, object]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with open_page(**options) as found:
        page = found.page
        if not options:
            before = axe.run(page)
            assert before.violations_count == 0, before.generate_report()
        choose(page, DOG)
        map_shown(page)
        page.get_by_label("Compare two maps").check()
        map_shown(page, 1)
        page.get_by_text("The same with curl").click()
        after = axe.run(page)
        assert after.violations_count == 0, after.generate_report()


def test_everything_is_reached_with_the_keyboard(open_page: Open) -> None:
    with open_page() as found:
        page = found.page
        page.get_by_role("button", name="Choose pictures").focus()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # the first example
        assert answers(page)[0] == "dog"
        map_shown(page)
        reached = set()
        for _ in range(24):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert {"top-k", "opacity", "smooth", "compare", "stack tall", "method", "save-png", "save-json"} <= reached | {
            "stack tall" if "stack" in reached else ""
        }


def test_long_labels_stay_inside(open_page: Open, server: Served) -> None:
    def lengthen(route):
        document = server.classify(DOG.read_bytes()).json()
        document["predictions"][0]["label"] = "Rindfleischetikettierungsüberwachungsaufgabenübertragungsgesetz, " * 5
        document["predictions"][1]["label"] = "<b>x</b>"
        route.fulfill(json=document)

    with open_page(**PHONE) as found:
        page = found.page
        page.route("**/classify?*", lengthen)
        choose(page, DOG)
        assert answers(page)[1] == "<b>x</b>"  # labels are text, never markup
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        expect(page.locator(".answer .score").first).to_be_in_viewport()


def test_it_works_behind_a_prefix(browser: Browser, server: Served) -> None:
    with tab(browser, "about:blank") as found:
        found.origin = server.url
        page = found.page
        page.route(
            f"{server.url}/**",
            lambda route: route.fulfill(status=404, body="outside the prefix", content_type="text/plain"),
        )
        page.route(
            f"{server.url}/vision/**",
            lambda route: route.continue_(url=route.request.url.replace("/vision/", "/", 1)),
        )
        page.goto(f"{server.url}/vision/")
        page.get_by_role("button", name="Example: a building site by the water").click()
        assert answers(page)
        map_shown(page)
        expect(page.locator("#curl-text")).to_contain_text("/vision/classify?top_k=5")


@pytest.fixture(scope="module")
def explains(server: Served) -> None:
    if "relevance" not in server.get("/model").json()["attention_methods"]:
        pytest.skip("the service offers no method that explains a class")


@pytest.mark.usefixtures("explains")
def test_a_label_is_clicked_and_its_map_is_drawn_beside_that_of_another(open_page: Open, server: Served) -> None:
    with open_page() as found:
        page = found.page
        choose(page, DOG)
        labels = answers(page)
        map_shown(page)
        expect(page.locator(".method")).to_have_value("relevance")
        expect(page.locator(".answer[aria-pressed=true] .label")).to_have_text(labels[0])
        of_first = pixels(page, ".heat")
        page.locator(".answer").nth(2).click()
        expect(page.locator(".answer[aria-pressed=true] .label")).to_have_text(labels[2])
        map_shown(page)
        assert (pixels(page, ".heat") != of_first).any()
        page.get_by_label("Compare two maps").check()
        map_shown(page, 1)
        expect(page.locator(".class").nth(1)).to_have_value(
            str(server.get("/labels").json()["labels"].index(labels[1]))
        )
        with page.expect_download() as saved:
            page.get_by_role("button", name="Download JSON").click()
        document = json.loads(Path(saved.value.path()).read_text())
        chosen = document["classification"]["predictions"][2]["index"]
        shown = document["maps"][0]
        query = f"/attention?id={shown['id']}&method=relevance&class={chosen}&format=json"
        np.testing.assert_allclose(shown["values"], server.get(query).json()["values"], atol=1e-6)
        # What has no layer offers none.
        expect(page.locator(".layer").first).to_be_hidden()


@pytest.mark.usefixtures("explains")
def test_every_method_is_drawn(open_page: Open, server: Served) -> None:
    with open_page() as found:
        page = found.page
        choose(page, DOG)
        map_shown(page)
        for method in server.get("/model").json()["attention_methods"]:
            page.locator(".method").select_option(method)
            expect(page.locator("#curl-text")).to_contain_text(f"method={method}")
            map_shown(page)
            assert pixels(page, ".heat")[..., 3].any(), method


def test_the_map_lies_where_the_model_looked_on_the_original(open_page: Open, server: Served) -> None:
    wide = io.BytesIO()
    with Image.open(DOG) as picture:
        picture.resize((300, 100)).save(wide, "JPEG")
    region = server.client.post("/attention?format=json", content=wide.getvalue()).json().get("region")
    if region is None:
        pytest.skip("the service does not say which part of a picture the model saw")
    with open_page() as found:
        choose(found.page, {"name": "wide.jpg", "mimeType": "image/jpeg", "buffer": wide.getvalue()})
        map_shown(found.page)
        heat = pixels(found.page, ".heat")
        assert heat.shape[:2] == (100, 300)
        left, right = region["x"], region["x"] + region["width"]
        columns = np.flatnonzero(heat[..., 3].any(axis=0))
        assert left - 2 <= columns.min() <= columns.max() <= right + 2


def test_deit_tiny_behind_a_key(browser: Browser, serve_module: Serve, shared: Path) -> None:
    served = serve_module(checkpoint=shared / "weights/deit_tiny_imagenet", backend="torch", api_keys="secret,other")
    with tab(browser, f"{served.url}/") as found:
        found.refusals_expected = True
        page = found.page
        choose(page, DOG)  # it waits for the key
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#key-note")).to_have_text("The service does not know this key.")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        assert answers(page)[0] == "Tibetan terrier, chrysanthemum dog"
        expect(page.locator("#key-form")).to_be_hidden()
        map_shown(page)
        assert "$VIT_API_KEY" in (page.locator("#curl-text").text_content() or "")
        assert "secret" not in page.content()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        page.reload()
        expect(page.get_by_label("API key")).to_be_visible()
