"""Take the pictures in docs/images: `make screenshots`.

Starts a service with DeiT-tiny from the folder that VIT_SHARED names, or with the bundled model.
"""

import argparse
import io
import os
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.e2e.page.browser import Browser, chromium, expect, tab
from tests.e2e.page.steps import CAT, DOG, choose, map_shown
from tests.launcher import ServerProcess

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


def main() -> None:
    """Take all pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs/images")
    output: Path = parser.parse_args().output
    weights = (
        Path(os.environ.get("VIT_SHARED", REPOSITORY.parent / "shared"))
        / "weights/deit_tiny_imagenet"
    )
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        log = Path(folder, "server.log")
        with ServerProcess(
            log, checkpoint=weights if weights.is_dir() else "bundled", model_name="deit-tiny"
        ) as server:
            for name, options in [*SCREENS.items()] * 2:  # the first round still compiles graphs
                screen = take(browser, f"{server.url}/", compare=name == "page_dark", **options)
                screen.save(output / f"{name}.jpg", quality=78, optimize=True, progressive=True)


if __name__ == "__main__":
    main()
