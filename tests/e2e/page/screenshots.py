"""Take the pictures of the page in docs/images: `make screenshots`.

Starts a service with DeiT-tiny from the folder that VIT_SHARED names, or with the bundled model.
The picture of the tab Teach needs the binary files of CIFAR-10 in the same folder.
"""

import argparse
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.e2e.page.browser import Browser, chromium, expect, tab
from tests.e2e.page.steps import CAT, DOG, choose, map_shown
from tests.launcher import ServerProcess
from tests.model.images.pictures import encode

REPOSITORY = Path(__file__).resolve().parents[3]

DESKTOP = {"viewport": {"width": 1280, "height": 900}}
SCREENS: dict[str, dict[str, Any]] = {
    "page": DESKTOP,
    "page_phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
    "page_dark": DESKTOP | {"color_scheme": "dark"},
}


def take(browser: Browser, url: str, *, compare: bool, **options: Any) -> Image.Image:
    """Return a screenshot of the dog; if `compare`, with the maps of two classes side by side."""
    with tab(browser, url, **options) as found:
        page = found.page
        for picture in (CAT, DOG):  # one after the other, so that neither waits for the other
            choose(page, picture)
            expect(page.locator("#photo-caption")).to_have_text(picture.name)
            expect(page.locator("#progress-text")).to_have_text("1 of 1 answered")
        if compare:
            page.get_by_label("Compare two maps").check()
        for index in range(1 + compare):
            map_shown(page, index)
        expect(page.locator("#live-p50")).not_to_have_text("\u2013")
        return Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")


def take_teaching(browser: Browser, url: str, pictures: dict[str, list[Any]]) -> Image.Image:
    """Return a screenshot of the tab Teach with a classifier of these pictures by label."""
    with tab(browser, url, viewport={"width": 900, "height": 900}) as found:
        page = found.page
        page.get_by_role("button", name="Teach", exact=True).click()
        page.locator("#head-name").fill("pets")
        page.keyboard.press("Enter")
        for label, files in pictures.items():
            page.get_by_label("New label").fill(label)
            page.get_by_role("button", name="Add label").click()
            page.get_by_label(f"Pictures of {label}", exact=True).set_input_files(files)
        count = sum(map(len, pictures.values()))
        expect(page.locator("#known")).to_have_text(
            re.compile(rf"^\d.* of {count} pictures right"), timeout=60_000
        )
        page.get_by_label("Picture to try").set_input_files(CAT)
        expect(page.locator("#tried")).to_have_text(re.compile(r"^cat\.jpg: "))
        page.locator("#teach-progress-text").scroll_into_view_if_needed()
        return Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")


def pets(file: Path) -> dict[str, list[Any]]:
    """Return 60 pictures of CIFAR-10 by label; one of the cats is a dog."""
    rows = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    by_label: dict[str, list[Any]] = {}
    for label, number in (("cat", 3), ("dog", 5), ("horse", 7)):
        by_label[label] = [
            {
                "name": f"{position}.png",
                "mimeType": "image/png",
                "buffer": encode(
                    Image.fromarray(rows[position, 1:].reshape(3, 32, 32).transpose(1, 2, 0)), "PNG"
                ),
            }
            for position in np.flatnonzero(rows[:, 0] == number)[:20]
        ]
    by_label["cat"].append(by_label["dog"].pop())
    return by_label


def main() -> None:
    """Take all pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs/images")
    output: Path = parser.parse_args().output
    shared = Path(os.environ.get("VIT_SHARED", REPOSITORY.parent / "shared"))
    weights = shared / "weights/deit_tiny_imagenet"
    cifar = shared / "data/cifar-10-batches-bin/test_batch.bin"
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        log = Path(folder, "server.log")
        options: dict[str, Any] = {
            "checkpoint": weights if weights.is_dir() else "bundled",
            "model_name": "deit-tiny",
        }
        with ServerProcess(log, **options) as server:
            for name, screen in [*SCREENS.items()] * 2:  # the first round still compiles graphs
                shot = take(browser, f"{server.url}/", compare=name == "page_dark", **screen)
                shot.save(output / f"{name}.jpg", quality=78, optimize=True, progressive=True)
        if not cifar.exists():
            return
        options |= {"teach": Path(folder, "taught"), "teach_thumbnails": True}
        with ServerProcess(log, **options) as server:
            shot = take_teaching(browser, f"{server.url}/", pets(cifar))
            shot.save(output / "teach.jpg", quality=78, optimize=True, progressive=True)


if __name__ == "__main__":
    main()
