"""Flags that every in-process command shares, and the warm predictor that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from service.engine.loading import load_predictor
from service.engine.messages import ModelInfo
from service.settings import ENV_PREFIX, Settings, load_settings

if TYPE_CHECKING:
    from model.runtime.predictor import Predictor

CHECKPOINT_FLAGS = ("image_size", "preprocess", "labels", "architecture")
_NAMES = ("checkpoint", *CHECKPOINT_FLAGS, "device", "dtype", "threads")


def add_model_flags(parser: argparse.ArgumentParser, names: Sequence[str] = _NAMES) -> None:
    """Add `--checkpoint`, `--device` and the like, as `vitserve serve` has them."""
    for name in names:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=f"{Settings.model_fields[name].description} [{ENV_PREFIX}{name.upper()}]",
        )


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Build settings from the given flags and the environment.

    Raises:
        SettingsError: a value is not allowed.
    """
    return load_settings({name: getattr(arguments, name) for name in _NAMES if hasattr(arguments, name)})


def predictor_from(arguments: argparse.Namespace) -> tuple[Predictor, ModelInfo, Settings]:
    """Return a warm predictor, the facts of its model, and the settings that it was made from.

    Raises:
        SettingsError, CheckpointError, DeviceError: one line that says why not.
    """
    settings = settings_from(arguments)
    predictor, info = load_predictor(settings)
    predictor.warm_up()
    return predictor, info, settings
