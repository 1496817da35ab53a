"""`vitserve train`: train or fine-tune on a folder of pictures, or on CIFAR-10."""

import argparse
import logging
import os
import tomllib
from pathlib import Path
from typing import Any

from model.calibration import CALIBRATION_FILE
from model.errors import TrainingError
from service.cli.image_files import add_output_flag, require_class_folders
from service.cli.setting_flags import serve_command
from service.observe import logs
from service.setting_values import parse_size
from service.settings import variable_of

logger = logging.getLogger("vitserve")

# Each flag (a field of the recipe, with dashes): the name of its value, and its help.
OVERRIDES = {
    "name": (
        "NAME",
        "what the service calls the model (default: the name of --out; of CIFAR-10, the recipe's)",
    ),
    "epochs": ("N", "times that every picture is seen"),
    "batch-size": ("N", "pictures a step"),
    "validation": ("N", "size of the validation set (100 or 0.1), where --data has none"),
    "precision": ("NAME", "auto, float32 or bfloat16"),
    "seed": ("N", "decides the split and all random choices"),
    "threads": ("N", "threads of one operator on the CPU"),
}

_NOT_OF_PROBE = ("recipe", "resume", "set", "epochs", "batch-size", "validation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve train`."""
    parser.description = (
        "Train or fine-tune on CIFAR-10's binary files or on any folder of pictures "
        "(docs/training.md). "
        "The result is a folder that `vitserve serve --checkpoint` takes."
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="one folder of pictures a class, in DIR or in splits (DIR/train, DIR/val); "
        "or CIFAR-10's binary files",
    )
    add_output_flag(parser, "DIR", "result; serve it with --checkpoint DIR", required=True)
    parser.add_argument(
        "--from",
        dest="checkpoint",
        metavar="CHECKPOINT",
        help="fine-tune this one, with a new head: `bundled`, a folder, or a hub id",
    )
    parser.add_argument(
        "--recipe",
        metavar="FILE",
        help="TOML, or the name of a bundled recipe (docs/training.md lists them); "
        "default: by --data and --from",
    )
    parser.add_argument(
        "--probe", action="store_true", help="with --from: fit a new head alone, in seconds"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last finished epoch in --out"
    )
    parser.add_argument(
        "--device", default=argparse.SUPPRESS, metavar="NAME", help="auto, cpu, cuda or cuda:N"
    )
    recipe = parser.add_argument_group("instead of the recipe's")
    for name, (metavar, text) in OVERRIDES.items():
        recipe.add_argument(f"--{name}", metavar=metavar, help=text)
    recipe.add_argument(
        "--image-size",
        type=parse_size,
        metavar="N|RxC",
        help="pixels of the model's input; positions are interpolated",
    )
    recipe.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field, as optimiser.learning_rate=1e-4 (repeatable)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, or fit a head alone, measure, and write the folder."""
    refused = [name for name in _NOT_OF_PROBE if getattr(arguments, name.replace("-", "_"))]
    if arguments.probe and arguments.checkpoint is None:
        raise TrainingError("--probe: needs --from CHECKPOINT, whose features it reads")
    if arguments.probe and refused:
        raise TrainingError(f"--probe: --{refused[0]} does not apply")
    require_class_folders(arguments.data)
    from model.extensions.training import new_head, train  # noqa: PLC0415  torch takes seconds to import
    from model.extensions.training.recipe import read_recipe  # noqa: PLC0415

    logs.configure("text", "info", waits=True)
    recipe = read_recipe(_recipe_path(arguments)).override(_overrides(arguments))
    device = getattr(arguments, "device", None) or os.environ.get(variable_of("device"), "auto")
    if arguments.probe:
        new_head.run(arguments.data, arguments.output, recipe, device=device)
    else:
        train.run(arguments.data, arguments.output, recipe, resume=arguments.resume, device=device)
    if not (arguments.output / CALIBRATION_FILE).exists():
        text = (
            "%s: without %s, so without --coverage: "
            "`vitserve calibrate` makes it, of pictures that were not trained on"
        )
        logger.info(text, arguments.output, CALIBRATION_FILE)
    print(f"{arguments.output}: serve it with: {serve_command(arguments.output)}")
    return 0


def _recipe_path(arguments: argparse.Namespace) -> Path:
    from model.extensions.training.recipe import RECIPES  # noqa: PLC0415  torch takes seconds to import
    from model.extensions.training.run_folder import RECIPE_FILE  # noqa: PLC0415
    from model.extensions.training.train import default_recipe  # noqa: PLC0415

    if arguments.recipe is not None:
        bundled = RECIPES / f"{arguments.recipe}.toml"
        if bundled.parent == RECIPES and bundled.is_file():
            return bundled
        if not Path(arguments.recipe).exists():
            names = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.toml")))
            raise TrainingError(
                f"--recipe {arguments.recipe}: no such file, and not one of {names}"
            )
        return Path(arguments.recipe)
    if arguments.resume:  # any other recipe would be a guess
        recipe: Path = arguments.output / RECIPE_FILE
        if not recipe.is_file():
            raise TrainingError(
                f"--resume: {arguments.output} holds no run ({RECIPE_FILE}): "
                "leave --resume out to begin one"
            )
        return recipe
    return default_recipe(arguments.data, arguments.checkpoint)


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    fields = ("checkpoint", "image_size", *(name.replace("-", "_") for name in OVERRIDES))
    overrides = {name: value for name in fields if (value := getattr(arguments, name)) is not None}
    if "checkpoint" in overrides:
        # The recipe's name, which is for any pictures, would name all results alike.
        overrides.setdefault("name", arguments.output.resolve().name)
    for text in arguments.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise TrainingError(f"--set {text}: expected FIELD=VALUE")
        overrides[name.strip()] = _value(value.strip())
    return overrides


def _value(text: str) -> Any:
    """Parse a TOML value; other text is a string, which then needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
