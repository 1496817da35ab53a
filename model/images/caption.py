"""What is written below a heat map: its caption, and its colours in words. PIL, never torch.

The font is the one that comes with Pillow, which has the characters of ASCII and hardly any other.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from model.outputs import LITTLE, MUCH, AttentionMap

# Longer side in pixels of a drawing, at least, that has a caption: a smaller one has no room for
# words.
_MIN_CAPTIONED: Final = 160

# Characters of a text that are looked at: none of these pictures has room for more.
_MAX_TEXT: Final = 500

# uint8 [256, 3], lowest value first.
Colours = NDArray[np.uint8]


def caption_of(attention: AttentionMap, labels: Sequence[str]) -> tuple[str, str]:
    """Return the two lines that say what a map is: its class with the score, and its method with
    the evidence.
    """
    request = attention.request
    if request.method == "cls":
        return "attention of one layer", f"cls, layer {request.layer}, head {request.head}"
    if request.method == "rollout":
        return "attention through all layers", "rollout"
    assert request.class_index is not None
    assert attention.score is not None
    assert attention.evidence is not None
    label, evidence = drawable(labels[request.class_index]), attention.evidence
    named = label if label.strip("? ,") else f"class {request.class_index}"
    score = f"{attention.score:.1%}" if attention.score >= 0.0005 else "< 0.1%"
    words = f"{_amount(evidence)} speaks for it here ({evidence:.2f})"
    if attention.abstained:
        words = "the model abstains: none of its labels fits"
    return f"{named}: {score}", f"{request.method}, {words}"


def _amount(evidence: float) -> str:
    if evidence >= MUCH:
        return "much"
    return "some" if evidence >= LITTLE else "little"


def drawable(text: str) -> str:
    """Return a text in one line of characters that the font has: without accents, and with a ? for
    what is not ASCII.

    A text is cut after 500 characters.
    """
    plain = unicodedata.normalize("NFKD", " ".join(text[:_MAX_TEXT].split()))
    without_accents = "".join(each for each in plain if not unicodedata.combining(each))
    return re.sub(r"[^ -~]+", "?", without_accents)[:_MAX_TEXT]


def fit_text(
    text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: float, end: str = ""
) -> str:
    """Return a text that can be drawn, cut before its `end` so that it is no wider than so many
    pixels.
    """
    text = drawable(text)
    if font.getlength(text + end) <= width:
        return text + end
    while text and font.getlength(f"{text}...{end}") > width:
        text = text[:-1]
    return f"{text}...{end}"


def _text_size(longer: int) -> int:
    return min(28, max(11, longer // 32))


def caption_height(longer: int) -> int:
    """Return how many pixels a caption takes below a drawing whose longer side, with it, is
    `longer`.
    """
    line = round(1.3 * _text_size(longer))
    return 0 if longer < _MIN_CAPTIONED else 3 * line + line // 2


def with_caption(
    drawing: Image.Image, lines: Sequence[str], colours: Colours, peak: float | None, *, longer: int
) -> Image.Image:
    """Return a drawing with a caption on white below it: two lines, and the colours in words.

    Args:
        lines: at most two, cut to the drawing's width before the last colon; a narrow drawing is
        made wider.
        peak: how many times the even share the highest patch has; None: the colours are left out.
        longer: see `caption_height`.
    """
    text = _text_size(longer)
    font, line, margin = ImageFont.load_default(text), round(1.3 * text), text // 3
    canvas = Image.new(
        "RGB",
        (max(drawing.width, min(longer, 12 * text)), drawing.height + caption_height(longer)),
        "white",
    )
    canvas.paste(drawing, (0, 0))
    pen, room, top = ImageDraw.Draw(canvas), canvas.width - 2 * margin, drawing.height + text // 4
    for words in lines[:2]:
        # A long label is cut, and the score behind it is not.
        label, mark, score = drawable(words).rpartition(": ") if ": " in words else (words, "", "")
        pen.text((margin, top), fit_text(label, font, room, mark + score), "black", font)
        top += line
    if peak is None:
        return canvas
    says = (
        f"peak: {peak:.0f} x an even share" if peak >= 9.95 else f"peak: {peak:.1f} x an even share"
    )
    left, more = round(margin + font.getlength("less ")), font.getlength(" more")
    bar = math.floor(margin + room - left - more - font.getlength(says) - text)
    if bar >= 2 * text:
        pen.text((margin, top), "less", "black", font)
        canvas.paste(
            Image.fromarray(colours[np.newaxis]).resize((bar, text)), (left, top + line - text - 1)
        )
        pen.text((left + bar, top), " more", "black", font)
    pen.text((margin + room, top), fit_text(says, font, room), "black", font, anchor="ra")
    return canvas
