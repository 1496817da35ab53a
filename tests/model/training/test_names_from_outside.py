"""Names of classes and models may come from strangers: they are text wherever they are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from model.data.image_folder import find_pictures
from model.errors import DatasetError, TrainingError
from model.training.recipe import RECIPES, read_recipe
from model.training.report.model_card import _text


def test_markup_in_a_name_is_shown_and_not_obeyed() -> None:
    assert _text("a|b <script>*x*") == r"a\|b &lt;script&gt;\*x\*"
    assert _text("tabby cat") == "tabby cat"


@pytest.mark.parametrize("name", ["new\nline", "bell\a"])
def test_a_class_that_cannot_be_printed_is_refused(tmp_path: Path, name: str) -> None:
    for folder in ("cat", name):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "1.png")
    with pytest.raises(DatasetError, match="cannot be printed"):
        find_pictures(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("name", "a\nb"), ("seed", 2**31), ("threads", 100_000), ("epochs", 10**12)]
)
def test_a_recipe_out_of_bounds_is_refused(field: str, value: object) -> None:
    with pytest.raises(TrainingError, match=field):
        read_recipe(RECIPES / "cifar10.toml").override({field: value})
