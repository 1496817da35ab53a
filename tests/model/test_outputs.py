"""Which attention map a request means."""

from typing import Any

import pytest

from model.config import ViTConfig
from model.errors import InputError
from model.outputs import MapRequest
from model.parameters import (
    MAX_CLASSES,
    parse_attention_head,
    parse_classes,
    parse_layer,
    parse_maps,
)
from tests.needs import needs_methods


@pytest.mark.parametrize(("given", "layer"), [(None, 2), (0, 0), (2, 2), (-1, 2), (-3, 0)])
def test_layers_count_from_either_end(given: int | None, layer: int) -> None:
    assert parse_layer(given, depth=3) == layer


@pytest.mark.parametrize(
    ("given", "head"), [(None, "mean"), ("mean", "mean"), ("max", "max"), ("0", 0), ("01", 1)]
)
def test_heads_are_combined_or_numbered(given: str | None, head: int | str) -> None:
    assert parse_attention_head(given, heads=2) == head


def test_a_missing_layer_or_head_is_named() -> None:
    for layer in (3, -4):
        with pytest.raises(
            InputError, match=r"^layer -?\d: the model has layers -3 ... 2$"
        ) as error:
            parse_layer(layer, depth=3)
        assert error.value.parameter == "layer"
    for head in ("2", "-1", "²", "median", ""):
        with pytest.raises(InputError, match=r"expected mean, max, or 0 ... 1$") as error:
            parse_attention_head(head, heads=2)
        assert error.value.parameter == "head"


LABELS = (
    "tabby, tabby cat",
    "tiger, Panthera tigris",
    "crane",
    "hoist, crane",
    "tiger cat",
    "crane",
    "7",
    "a,b ,c",
)


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("3", [3]),
        ("07", [7]),
        ("7", [6]),
        ("tabby", [0]),
        ("Tabby, Tabby Cat", [0]),
        ("tabby,tiger", [0, 1]),
        ("tiger cat, 2 ,hoist", [4, 2, 3]),
        ("tabby,tabby cat,tabby", [0, 0]),
        ("hoist, crane", [3]),
        ("a, b,c", [7]),
        ("c", [7]),
    ],
)
def test_classes_have_an_index_or_a_name(text: str, classes: list[int]) -> None:
    assert parse_classes(text, LABELS) == classes


@pytest.mark.parametrize(("text", "classes"), [("1", [0]), ("10", [1]), ("0,2", [2, 2])])
def test_label_of_digits_comes_before_index(text: str, classes: list[int]) -> None:
    assert parse_classes(text, ("1", "10", "0")) == classes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("crane", "class 'crane' is ambiguous: 2, 5 are called that"),
        ("dog", "class 'dog' is unknown; expected a label or an index below 8"),
        ("8", "class '8' is unknown"),
        ("9999999999", "is unknown"),
        ("-1", "class '-1' is unknown"),
        ("\u00b2", "is unknown"),
        ("", "class '' is unknown"),
        ("0,,1", "class '' is unknown"),
        (",".join("0" * (MAX_CLASSES + 1)), "more than 8 classes"),
    ],
)
def test_a_class_that_is_not_one_is_an_error(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        parse_classes(text, LABELS)
    assert error.value.parameter == "class"


def maps(**said: Any) -> list[MapRequest]:
    config = ViTConfig(
        image_size=(8, 8), patch_size=4, width=8, depth=3, heads=2, mlp_width=8, num_classes=8
    )
    return parse_maps(config, LABELS, **said)


@pytest.mark.parametrize(
    ("said", "requests"),
    [
        ({}, [MapRequest("relevance")]),
        ({"layer": -3}, [MapRequest("cls", layer=0, attention_head="mean")]),
        ({"head": "1"}, [MapRequest("cls", layer=2, attention_head=1)]),
        ({"method": "cls"}, [MapRequest.attention_row(2)]),
        pytest.param({"method": "rollout"}, [MapRequest("rollout")], marks=needs_methods),
        ({"classes": "tiger, 07"}, [MapRequest("relevance", 1), MapRequest("relevance", 7)]),
        pytest.param({"method": "gae"}, [MapRequest("gae")], marks=needs_methods),
    ],
)
def test_omitted_options_follow_from_others(
    said: dict[str, Any], requests: list[MapRequest]
) -> None:
    assert maps(**said) == requests


@pytest.mark.parametrize(
    ("said", "parameter", "says"),
    [
        (
            {"method": "gradcam"},
            "method",
            "method 'gradcam': expected one of relevance, cls",
        ),
        ({"method": ""}, "method", "method '': expected one of relevance, cls"),
        ({"method": "cls", "classes": "3"}, "class", "class does not apply to method 'cls'"),
        (
            {"method": "relevance", "head": "max"},
            "head",
            "head does not apply to method 'relevance'",
        ),
    ],
)
def test_a_map_that_there_is_not_is_an_error(
    said: dict[str, Any], parameter: str, says: str
) -> None:
    with pytest.raises(InputError, match=says) as error:
        maps(**said)
    assert error.value.parameter == parameter
