"""`vitserve train`: run a recipe on CIFAR-10's binary files; the result is served at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_RECIPE = Path(__file__).resolve().parents[2] / "model" / "training" / "recipes" / "cifar10.toml"
_OVERRIDES = {"epochs": int, "batch_size": int, "seed": int, "threads": int}


def add_parser(commands: Any) -> None:
    """Flags of `vitserve train`."""
    parser = commands.add_parser("train", help="train a checkpoint on CIFAR-10")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="CIFAR-10's binary files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="result; serve it with --checkpoint DIR")
    parser.add_argument("--recipe", type=Path, default=_RECIPE, metavar="FILE", help="TOML (default: the bundled one)")
    parser.add_argument("--resume", action="store_true", help="go on from the last finished epoch in --out")
    for name, kind in _OVERRIDES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help="instead of the recipe's")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, fit the temperature, write the checkpoint, read the test set once.

    Raises:
        TrainingError, DatasetError: one line that says what is wrong with the recipe or the data.
    """
    from model.training.recipe import read_recipe  # noqa: PLC0415  torch takes seconds to import
    from model.training.train import run as train  # noqa: PLC0415

    given = {name: value for name in _OVERRIDES if (value := getattr(arguments, name)) is not None}
    train(arguments.data, arguments.out, read_recipe(arguments.recipe).override(**given), resume=arguments.resume)
    return 0
