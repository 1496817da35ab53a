"""`vitserve train`: fine-tune on any folder of pictures, or fit a head to it; the result is served at once."""

from __future__ import annotations

import argparse
import os
import tomllib
from pathlib import Path
from typing import Any

from model.errors import TrainingError
from model.training.recipe import Recipe
from service.cli.setting_flags import serve_command
from service.observe import logs
from service.settings import ENV_PREFIX


def _size(text: str) -> tuple[int, int]:
    """Parse `224`, or `224x160` (rows x columns)."""
    rows, _, columns = text.lower().partition("x")
    return int(rows), int(columns or rows)


# Each flag (a field of the recipe, with dashes): the name of its value, and its help.
OVERRIDES = {
    "name": ("NAME", "what the service calls the model (default: the name of --out)"),
    "epochs": ("N", "times that every picture is seen"),
    "batch-size": ("N", "pictures a step"),
    "validation": ("N", "size of the validation set (100 or 0.1), where --data has none"),
    "precision": ("NAME", "auto, float32 or bfloat16"),
    "seed": ("N", "decides the split and all random choices"),
    "threads": ("N", "threads of one operator on the CPU"),
}

_NOT_OF_PROBE = ("set", "epochs", "batch-size", "validation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve train`."""
    parser.description = (
        "Fine-tune a checkpoint on any folder of pictures, or fit a new head to it (docs/training.md). "
        "The result is a folder that `vitserve serve --checkpoint` takes."
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="one folder of pictures a class, in DIR or in DIR/train, DIR/val, DIR/test; or CIFAR-10's binary files",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="result; serve it with --checkpoint DIR")
    parser.add_argument(
        "--from",
        dest="checkpoint",
        required=True,
        metavar="CHECKPOINT",
        help="what gets a new head: `bundled`, a folder, or a hub id",
    )
    parser.add_argument("--probe", action="store_true", help="fit the new head alone, in seconds")
    parser.add_argument("--device", default=argparse.SUPPRESS, metavar="NAME", help="auto, cpu, cuda or cuda:N")
    recipe = parser.add_argument_group("instead of the recipe's")
    for name, (metavar, text) in OVERRIDES.items():
        recipe.add_argument(f"--{name}", metavar=metavar, help=text)
    recipe.add_argument(
        "--image-size", type=_size, metavar="N|RxC", help="pixels of the model's input; positions are interpolated"
    )
    recipe.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field, as learning_rate=1e-4 (repeatable)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, or fit a head alone, measure, and write the folder."""
    given = [name for name in _NOT_OF_PROBE if getattr(arguments, name.replace("-", "_"))]
    if arguments.probe and given:
        raise TrainingError(f"--probe: --{given[0]} does not apply")
    from model.training import new_head, train  # noqa: PLC0415  torch takes seconds to import

    logs.configure("text", "info")
    recipe = Recipe.of(_fields(arguments))
    device = getattr(arguments, "device", None) or os.environ.get(f"{ENV_PREFIX}DEVICE", "auto")
    if arguments.probe:
        new_head.run(arguments.data, arguments.out, recipe, device=device)
    else:
        train.run(arguments.data, arguments.out, recipe, device=device)
    print(f"{arguments.out}: serve it with: {serve_command(arguments.out)}")  # noqa: T201
    return 0


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a recipe that are given."""
    fields = ("checkpoint", "image_size", *(name.replace("-", "_") for name in OVERRIDES))
    given = {"name": arguments.out.resolve().name}
    given |= {name: value for name in fields if (value := getattr(arguments, name)) is not None}
    for text in arguments.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise TrainingError(f"--set {text}: expected FIELD=VALUE")
        given[name.strip()] = _value(value.strip())
    return given


def _value(text: str) -> Any:
    """Parse a TOML value; text that is none is taken as it stands, so that a string needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
