"""Which attention map is meant."""

from __future__ import annotations

import pytest

from model.errors import InputError
from model.prediction import parse_head, parse_layer


@pytest.mark.parametrize(("given", "layer"), [(None, 2), (0, 0), (2, 2), (-1, 2), (-3, 0)])
def test_layers_count_from_zero_and_from_the_end(given: int | None, layer: int) -> None:
    assert parse_layer(given, depth=3) == layer


@pytest.mark.parametrize(("given", "head"), [(None, "mean"), ("mean", "mean"), ("max", "max"), ("0", 0), ("01", 1)])
def test_heads_are_combined_or_numbered(given: str | None, head: int | str) -> None:
    assert parse_head(given, heads=2) == head


def test_what_the_model_does_not_have_is_an_error_that_names_the_parameter() -> None:
    for layer in (3, -4):
        with pytest.raises(InputError, match=r"^layer -?\d: the model has layers -3 ... 2$") as error:
            parse_layer(layer, depth=3)
        assert error.value.parameter == "layer"
    for head in ("2", "-1", "²", "median", ""):
        with pytest.raises(InputError, match=r"expected mean, max, or 0 ... 1$") as error:
            parse_head(head, heads=2)
        assert error.value.parameter == "head"
