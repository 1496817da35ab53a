"""Captions below maps: whatever the label, the map and the size of the drawing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFont

from model.images.caption import caption_height, caption_of, drawable, fit_text
from model.images.heatmap import MAX_SIZE, Look, draw_heatmap
from model.images.sheet import draw_maps
from model.outputs import AttentionMap, MapRequest

PICTURE = np.full((40, 40, 3), 90, np.uint8)
PEAK = np.array([[1, 0], [0, 0]], np.float32)


def of_class(evidence: float = 1.0, score: float = 0.6312, index: int = 0) -> AttentionMap:
    return AttentionMap(MapRequest("relevance", index), PEAK, 1.0, score, evidence)


@pytest.mark.parametrize(
    ("attention", "lines"),
    [
        (of_class(), ("tabby, tabby cat: 63.1%", "relevance, evidence 1.00")),
        (of_class(0.0312, 0.00001), ("tabby, tabby cat: < 0.1%", "relevance, little speaks for it here (0.03)")),
        (of_class(0.19, index=1), ("uber alles...? (Kafer): 63.1%", "relevance, little speaks for it here (0.19)")),
        (of_class(0.2, index=2), ("class 2: 63.1%", "relevance, evidence 0.20")),
        (AttentionMap(MapRequest.row(3, "max"), PEAK, 1.0), ("attention of one layer", "cls, layer 3, head max")),
        (
            AttentionMap(MapRequest("rollout"), PEAK, 1.0),
            ("attention through all layers", "rollout"),
        ),
    ],
)
def test_a_caption_says_class_score_method_and_evidence(attention: AttentionMap, lines: tuple[str, str]) -> None:
    assert (
        caption_of(attention, ["tabby, tabby cat", "\u00fcber\nalles\u2026\u732b (K\u00e4fer)", "\u732b\u3001\u72ac"])
        == lines
    )


@given(st.text(max_size=600))
def test_any_label_becomes_one_line_that_the_font_has(label: str) -> None:
    shown = drawable(label)
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) <= 500
    font = ImageFont.load_default(12)
    assert font.getlength(fit_text(label, font, 80)) <= 80


def test_a_long_label_is_cut_before_its_score() -> None:
    font, labels = ImageFont.load_default(12), ["hippopotamus, hippo, river horse, Hippopotamus amphibius"]
    drawn, score = caption_of(of_class(), labels)[0].rsplit(": ", 1)
    shown = fit_text(drawn, font, 180, f": {score}")
    assert shown.startswith("hippopotamus, ")
    assert shown.endswith("...: 63.1%")
    assert font.getlength(shown) <= 180
    look: dict[str, Any] = {"picture": PICTURE, "size": 240}
    scores = [np.asarray(draw_maps([of_class(score=score)], labels, **look)) for score in (0.6, 0.7)]
    assert (scores[0] != scores[1]).any(), "the score is seen"


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.integers(1, 600),
    st.text(max_size=30),
    st.booleans(),
)
def test_a_drawing_with_its_caption_keeps_the_longer_side(
    shape: tuple[int, int], size: int, label: str, overlay: bool
) -> None:
    picture, look = np.zeros((*shape, 3), np.uint8), {"size": size, "overlay": overlay}
    drawn = draw_maps([of_class()], [label], picture=picture, **look)  # type: ignore[arg-type]
    assert max(drawn.size) == size
    if size < 160:  # which has no room for one
        assert drawn.size == draw_maps([of_class()], None, picture=picture, **look).size  # type: ignore[arg-type]


def test_no_drawing_is_larger_than_allowed_with_its_caption() -> None:
    tall = np.zeros((2048, 2048, 3), np.uint8)
    drawn = draw_maps([of_class()], ["a"], picture=tall)
    assert drawn.size == (MAX_SIZE - caption_height(MAX_SIZE), MAX_SIZE)
    row = draw_maps([of_class()] * 8, ["a"], picture=PICTURE, max_width=MAX_SIZE)
    assert 2000 < row.width <= MAX_SIZE
    below = np.asarray(row)[-caption_height(252) :]
    inked = [(below[:, 256 * place : 256 * (place + 1)] < 90).any() for place in range(8)]
    assert all(inked), "each class has its own"


def ink(image: Image.Image, top: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    pixels = np.asarray(image)[top:].astype(int)
    coloured: np.ndarray[Any, np.dtype[np.bool_]] = pixels.max(axis=2) - pixels.min(axis=2) > 60
    return coloured


def test_the_colours_stand_below_in_words_unless_none_are_drawn() -> None:
    for alpha, coloured in ((0.7, True), (0.0, False)):
        drawn = draw_heatmap(PEAK, Look(size=384, alpha=alpha), picture=PICTURE, caption=("a", "b"))
        assert ink(drawn, drawn.height - caption_height(384)).any() == coloured
    assert ink(draw_heatmap(PEAK, Look(size=384), picture=PICTURE), 0).any()
    words = [draw_heatmap(PEAK, Look(size=384), picture=PICTURE, caption=(text, "")) for text in ("a", "b")]
    assert words[0].tobytes() != words[1].tobytes()


def test_a_map_fades_with_its_evidence_once_beside_others_and_alone() -> None:
    look: dict[str, Any] = {"picture": np.zeros((64, 64, 3), np.uint8), "size": 64, "smooth": False, "colormap": "gray"}

    def brightest(maps: list[AttentionMap]) -> list[int]:
        row = np.asarray(draw_maps(maps, None, **look))
        return [int(row[:, 68 * place : 68 * place + 64].max()) for place in range(len(maps))]

    [whole] = brightest([of_class()])
    assert whole == pytest.approx(0.7 * 255, abs=3)
    for evidence in (0.5, 0.2, 0.05):
        [faded] = brightest([of_class(evidence)])
        assert faded == pytest.approx(evidence * 0.7 * 255, abs=4)
        assert brightest([of_class(evidence), of_class()]) == pytest.approx([faded, whole], abs=4)
        look["overlay"] = False
        assert brightest([of_class(evidence)]) == pytest.approx([255 * evidence], abs=1)
        del look["overlay"]
    assert brightest([of_class(0.0)]) == [0]
