"""The text below a heat map: its caption, and its colours in words. PIL, never torch.

The font comes with Pillow and has hardly any characters outside ASCII.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from model.methods import methods
from model.outputs import LITTLE_EVIDENCE, MUCH_EVIDENCE, AttentionMap

# Drawings whose longer side in pixels is below this get no caption, because words do not fit.
_MIN_CAPTIONED: Final = 160

# Longer texts are cut to this number of characters, because no picture has room for more.
_MAX_TEXT: Final = 500

# uint8 [256, 3], lowest value first.
Colours = NDArray[np.uint8]


def caption_of(attention: AttentionMap, labels: Sequence[str]) -> tuple[str, str]:
    """Return the two lines of a caption: class with score, then method with evidence."""
    request = attention.request
    if request.method == "cls":
        return (
            "attention of one layer",
            f"cls, layer {request.layer}, head {request.attention_head}",
        )
    if not request.is_class_specific:
        return methods()[request.method].summary, request.method
    assert request.class_index is not None
    assert attention.score is not None
    assert attention.evidence is not None
    label = drawable(labels[request.class_index])
    if not label.strip("? ,"):
        label = f"class {request.class_index}"
    score = f"{attention.score:.1%}" if attention.score >= 0.0005 else "< 0.1%"
    verdict = f"{_amount(attention.evidence)} evidence for it here ({attention.evidence:.2f})"
    if attention.abstained:
        verdict = "the model abstains: none of its labels fits"
    return f"{label}: {score}", f"{request.method}, {verdict}"


def _amount(evidence: float) -> str:
    """Return evidence from 0 to 1 in words."""
    if evidence >= MUCH_EVIDENCE:
        return "much"
    return "some" if evidence >= LITTLE_EVIDENCE else "little"


def drawable(text: str) -> str:
    """Return the text in one line of characters that the font has, cut after 500 characters.

    Accents are removed. A run of other characters outside ASCII becomes a question mark.
    """
    plain = unicodedata.normalize("NFKD", " ".join(text[:_MAX_TEXT].split()))
    without_accents = "".join(char for char in plain if not unicodedata.combining(char))
    return re.sub(r"[^ -~]+", "?", without_accents)[:_MAX_TEXT]


def fit_text(
    text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: float, end: str = ""
) -> str:
    """Return the text, then `end`, with the text cut so that both fit in `width` pixels."""
    text = drawable(text)
    if font.getlength(text + end) <= width:
        return text + end
    while text and font.getlength(f"{text}...{end}") > width:
        text = text[:-1]
    return f"{text}...{end}"


def _text_size(longer: int) -> int:
    """Return the font size in pixels for a drawing with this longer side."""
    return min(28, max(11, longer // 32))


def caption_height(longer: int) -> int:
    """Return the height in pixels of the caption; 0 if the drawing is too small for one.

    Args:
        longer: longer side of the drawing with its caption, in pixels.
    """
    line = round(1.3 * _text_size(longer))
    return 0 if longer < _MIN_CAPTIONED else 3 * line + line // 2


def with_caption(
    drawing: Image.Image, lines: Sequence[str], colours: Colours, peak: float | None, *, longer: int
) -> Image.Image:
    """Return the drawing with a caption on white below it: two lines, then the colours in words.

    Args:
        lines: at most two. A line that is too long is cut before its last colon. A narrow drawing
            is widened.
        peak: highest patch, as a multiple of the even share; None leaves the colours out.
        longer: see `caption_height`.
    """
    text_size = _text_size(longer)
    font = ImageFont.load_default(text_size)
    line_height = round(1.3 * text_size)
    margin = text_size // 3
    width = max(drawing.width, min(longer, 12 * text_size))
    canvas = Image.new("RGB", (width, drawing.height + caption_height(longer)), "white")
    canvas.paste(drawing, (0, 0))
    pen = ImageDraw.Draw(canvas)
    text_width = width - 2 * margin
    top = drawing.height + text_size // 4
    for line in lines[:2]:
        label = line
        end = ""
        if ": " in line:  # cut a long label, not the score after it
            label, colon, score = drawable(line).rpartition(": ")
            end = colon + score
        pen.text((margin, top), fit_text(label, font, text_width, end), "black", font)
        top += line_height
    if peak is None:
        return canvas
    decimals = 0 if peak >= 9.95 else 1
    peak_text = f"peak: {peak:.{decimals}f} x an even share"
    left = round(margin + font.getlength("less "))
    taken = left + font.getlength(" more") + font.getlength(peak_text) + text_size
    bar_width = math.floor(margin + text_width - taken)
    if bar_width >= 2 * text_size:
        pen.text((margin, top), "less", "black", font)
        bar = Image.fromarray(colours[np.newaxis]).resize((bar_width, text_size))
        canvas.paste(bar, (left, top + line_height - text_size - 1))
        pen.text((left + bar_width, top), " more", "black", font)
    right = (margin + text_width, top)
    pen.text(right, fit_text(peak_text, font, text_width), "black", font, anchor="ra")
    return canvas
