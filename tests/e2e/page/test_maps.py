"""Maps on the page in a real browser, with the bundled model and real pictures."""

import io
import json
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.e2e.page.browser import Page, Tab, expect
from tests.e2e.page.steps import DOG, answers, choose, map_shown, open_choices, pixels
from tests.e2e.serving import Served
from tests.launcher import PATIENCE
from tests.model.images.pictures import encode

pytestmark = pytest.mark.timeout(180)  # a server and a browser start


def test_maps_fit_pictures_shrunk_to_send(
    page: Page, found: Tab, server: Served, tmp_path: Path
) -> None:
    photo = tmp_path / "photo.jpg"
    quarter_turn = 6
    with Image.open(DOG) as picture:
        lying = picture.resize((900, 1200)).transpose(Image.Transpose.ROTATE_90)
    photo.write_bytes(encode(lying, "JPEG", quarter_turn, quality=100))
    smaller = encode(lying, "JPEG", quarter_turn, quality=50)
    assert (
        photo.stat().st_size > 200_000 > len(smaller)
    )  # the largest upload that the server accepts
    found.refusals_expected = True
    choose(page, photo)
    expect(page.get_by_role("alert")).to_contain_text("larger than the service accepts")
    page.get_by_label("Shrink large pictures before sending").check()
    choose(page, photo)
    assert answers(page)[0] == "dog"
    map_shown(page)
    page.locator(".answer").nth(1).click()
    map_shown(page)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download JSON").click()
    document = json.loads(Path(saved.value.path()).read_text())
    expected = server.classify(smaller, "attention=true").json()["attention"]["region"]
    for map_ in (document["classification"]["attention"], *document["maps"]):
        assert map_["region"] == {
            name: pytest.approx(value, abs=8) for name, value in expected.items()
        }


def test_two_map_choices_stand_side_by_side(page: Page, server: Served) -> None:
    choose(page, DOG)
    map_shown(page)
    open_choices(page)
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
    open_choices(page, 1)
    page.locator("figure.map").nth(1).locator(".head").select_option("max")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download JSON").click()
    document = json.loads(Path(saved.value.path()).read_text())
    assert document["classification"]["predictions"][0]["label"] == "dog"
    [first, second] = document["maps"]
    assert [(found["layer"], found["head"]) for found in (first, second)] == [(1, 2), (1, "max")]
    query = f"/attention?id={first['id']}&method=cls&layer=1&head=2&format=json"
    np.testing.assert_allclose(first["values"], server.get(query).json()["values"], atol=1e-6)
    page.get_by_label("Compare two maps").uncheck()
    expect(page.locator("figure.map")).to_have_count(1)


def test_the_page_draws_maps_as_the_service(page: Page, server: Served) -> None:
    look = "overlay=false&caption=false&size=256"
    png = server.client.post(f"/attention?{look}", content=DOG.read_bytes()).content
    region = server.client.post("/attention?format=json", content=DOG.read_bytes()).json()["region"]
    with Image.open(io.BytesIO(png)) as drawn, Image.open(DOG) as photo:
        expected = np.asarray(drawn.convert("RGB")).astype(int)
        width = photo.width
    choose(page, DOG)
    map_shown(page)
    smooth = pixels(page, ".heat")
    scale = smooth.shape[1] / width
    left, top, across, down = (
        round(scale * region[name]) for name in ("x", "y", "width", "height")
    )
    seen = Image.fromarray(smooth[top : top + down, left : left + across]).resize((256, 256))
    actual = np.asarray(seen).astype(int)
    strong = actual[..., 3] > 128
    assert strong.any()
    assert np.abs(actual[..., :3] - expected)[strong].mean() < 8
    page.get_by_label("Smooth").uncheck()
    squares = pixels(page, ".heat")
    assert len(np.unique(squares[..., 3])) <= 64 < len(np.unique(smooth[..., 3]))
    page.get_by_label("Map opacity").fill("25")
    expect(page.locator(".heat")).to_have_css("opacity", "0.25")
    # Only the photo, while the button is held.
    page.get_by_role("button", name="Hold to see the photo").hover()
    page.mouse.down()
    assert not pixels(page, ".heat").any()
    page.mouse.up()
    assert pixels(page, ".heat").any()


def test_a_patch_tells_its_share(page: Page, server: Served) -> None:
    choose(page, DOG)
    map_shown(page)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download JSON").click()
    [shown] = json.loads(Path(saved.value.path()).read_text())["maps"]
    values = np.array(shown["values"])
    region = shown.get("region")
    with Image.open(DOG) as picture:
        width, height = picture.size
    left, top, across, down = (
        (
            region["x"] / width,
            region["y"] / height,
            region["width"] / width,
            region["height"] / height,
        )
        if region
        else (0, 0, 1, 1)
    )

    def told(row: int, column: int) -> re.Pattern[str]:
        share = 100 * values[row, column] / values.sum()
        return re.compile(rf"Row {row + 1}, column {column + 1}: {re.escape(f'{share:.3g}')}\d* %")

    box = page.locator(".map .stack").bounding_box()
    assert box is not None
    x = box["x"] + box["width"] * (left + across * 2.5 / 8)
    page.mouse.move(x, box["y"] + box["height"] * (top + down * 3.5 / 8))
    readout = page.locator(".readout")
    expect(readout).to_have_text(told(3, 2))
    expect(page.locator(".patch")).to_be_visible()
    page.mouse.move(1, 1)
    expect(page.locator(".patch")).to_be_hidden()
    page.locator("#pictures button").focus()
    page.keyboard.press("Tab")
    row, column = divmod(int(values.argmax()), 8)
    expect(readout).to_have_text(told(row, column))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    expect(readout).to_have_text(told(min(7, row + 1), max(0, column - 1)))


def test_curl_calls_give_the_shown_answer(page: Page, tmp_path: Path) -> None:
    (tmp_path / "a dog, 'small'.jpg").write_bytes(DOG.read_bytes())
    with page.expect_request("**/classify?*") as sent:
        choose(page, tmp_path / "a dog, 'small'.jpg")
    labels = answers(page)
    map_shown(page)
    page.get_by_text("The same request with curl").click()
    classify, attention = page.locator("#curl-text").inner_text().splitlines()
    assert shlex.split(classify)[-1] == sent.value.url  # another request may have other scores
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, check=True, timeout=PATIENCE)
    answer = json.loads(run([*shlex.split(classify), "--silent", "--noproxy", "*"]).stdout)
    assert [found["label"] for found in answer["predictions"]] == labels
    run([*shlex.split(attention), "--silent", "--fail", "--noproxy", "*"])
    with Image.open(tmp_path / "map.png") as drawn:
        assert drawn.format == "PNG"


def test_a_clicked_label_gets_its_own_map(page: Page, server: Served) -> None:
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
    index = server.get("/labels").json()["labels"].index(labels[1])
    expect(page.locator(".class").nth(1)).to_have_value(f"{labels[1]} ({index})")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download JSON").click()
    document = json.loads(Path(saved.value.path()).read_text())
    chosen = document["classification"]["predictions"][2]["index"]
    shown = document["maps"][0]
    query = f"/attention?id={shown['id']}&method=relevance&class={chosen}&format=json"
    np.testing.assert_allclose(shown["values"], server.get(query).json()["values"], atol=1e-6)
    # Two maps share a scale, and the picker searches classes by name.
    [high, other] = page.locator(".high").all_inner_texts()
    assert high == other
    open_choices(page, 1)
    page.locator(".class").nth(1).fill("fro")
    expect(page.locator(".choices datalist").nth(1).locator("option")).to_have_attribute(
        "value", re.compile(r"^frog \(6\)$")
    )
    page.keyboard.press("Enter")
    expect(page.locator(".class").nth(1)).to_have_value("frog (6)")
    expect(page.locator(".readout")).to_have_text(
        [f"Little evidence for {label}" for label in (labels[2], "frog")]
    )
    expect(page.locator(".ramp").first).to_have_css(
        "opacity", re.compile("^0")
    )  # the colours fade with the map
    page.evaluate(
        """() => {
          const { prototype } = CanvasRenderingContext2D, { fillText } = prototype;
          window.written = [];
          prototype.fillText = function (...values) {
            written.push(values[0]);
            fillText.apply(this, values);
          };
        }"""
    )
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download PNG").click()
    assert saved.value.suggested_filename == "dog-map.png"
    with Image.open(saved.value.path()) as picture:
        assert picture.width > picture.height
    assert re.match(
        rf"{labels[2]}, 0.* %, evidence 0.*; frog, 0.* %, evidence 0",
        "; ".join(page.evaluate("written")),
    )
    # Methods without layers do not offer layers.
    expect(page.locator(".layer").first).to_be_hidden()


def test_the_map_covers_what_the_model_saw(page: Page, server: Served) -> None:
    with Image.open(DOG) as picture:
        wide = encode(picture.resize((600, 100)), "JPEG")
    region = server.client.post("/attention?format=json", content=wide).json()["region"]
    choose(page, {"name": "wide.jpg", "mimeType": "image/jpeg", "buffer": wide})
    map_shown(page)
    heat = pixels(page, ".heat")
    rows, across = heat.shape[:2]
    assert rows * 6 == pytest.approx(across, abs=6)
    left = region["x"]
    right = region["x"] + region["width"]
    columns = np.flatnonzero(heat[..., 3].any(axis=0)) * 600 / across
    box = page.locator(".map .stack").bounding_box()
    assert box is not None and box["height"] > 200  # not a strip of a few pixels
    assert left - 2 <= columns.min() <= columns.max() <= right + 2
    expect(page.locator(".map-note")).to_have_text("Darkened: parts that the model did not see")
