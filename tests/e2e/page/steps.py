"""Actions of a person on the page, and the visible results."""

import base64
import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from PIL import Image

from tests.e2e.page.browser import Page, Tab, expect

Open = Callable[..., AbstractContextManager[Tab]]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DOG = EXAMPLES / "dog.jpg"
CAT = EXAMPLES / "cat.jpg"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def answers(page: Page) -> list[str]:
    """Return the labels on screen as soon as they appear."""
    expect(page.locator(".answer").first).to_be_visible()
    return page.locator(".answer .label").all_inner_texts()


def choose(page: Page, *files: Path | dict[str, object]) -> None:
    page.locator("#files").set_input_files(list(files))  # type: ignore[arg-type]


def map_shown(page: Page, index: int = 0) -> None:
    """Wait for a map."""
    expect(page.locator(".map .readout").nth(index)).to_contain_text(
        re.compile("^(Coloured|Little evidence)")
    )
    expect(page.locator("figure.map").nth(index)).not_to_have_attribute("aria-busy", "true")


def open_choices(page: Page, index: int = 0) -> None:
    """Open the controls for a map's class and method."""
    page.locator(".choices summary").nth(index).click()


def pixels(page: Page, selector: str) -> np.ndarray:
    """Return the pixels of a canvas: uint8 [rows, columns, 4]."""
    url = page.locator(selector).first.evaluate("(canvas) => canvas.toDataURL('image/png')")
    return np.asarray(
        Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGBA")
    )


def require_no_overflow(page: Page) -> None:
    """Check that the page is not wider than a desktop's window or than a phone's."""
    for width, height in ((1280, 900), (360, 740)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def send_event(page: Page, kind: str, files: list[Path], place: str = "#drop") -> None:
    """Drop or paste files on an element: send the event with its data."""
    content = [[path.name, base64.b64encode(path.read_bytes()).decode()] for path in files]
    page.evaluate(
        """([kind, files, place]) => {
          const data = new DataTransfer();
          for (const [name, text] of files) {
            const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
            data.items.add(new File([bytes], name, { type: "image/jpeg" }));
          }
          const options = { bubbles: true, cancelable: true };
          document.querySelector(place).dispatchEvent(kind === "paste"
            ? new ClipboardEvent("paste", { ...options, clipboardData: data })
            : new DragEvent("drop", { ...options, dataTransfer: data }));
        }""",
        [kind, content, place],
    )
