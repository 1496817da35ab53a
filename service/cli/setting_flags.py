"""Settings as flags of the subcommands, and the predictor that they describe."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ByteSize

from model.errors import InputError
from service.engine.loading import load_predictor
from service.engine.messages import ModelInfo
from service.extension import extensions
from service.setting_warnings import check_variables
from service.settings import (
    Settings,
    flag_of,
    load_settings,
    settings_class,
    variable_of,
)

if TYPE_CHECKING:
    from model.runtime.predictor import Predictor

CHECKPOINT_FLAGS = (
    "image_size",
    "preprocess",
    "labels",
    "activation",
    "architecture",
    "base",
    "keys",
)
MODEL_FLAGS = ("checkpoint", *CHECKPOINT_FLAGS, "device", "dtype")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint as an argument and as `--checkpoint`; VIT_CHECKPOINT is the default."""
    parser.add_argument(
        "checkpoint",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="CHECKPOINT",
        help="a folder, a file, a hub id or `bundled` (docs/checkpoints.md)",
    )
    add_setting_flags(parser, ["checkpoint"])


def require_checkpoint(arguments: argparse.Namespace, command: str) -> None:
    """Raise `InputError` if neither the arguments nor the environment name a checkpoint."""
    if not hasattr(arguments, "checkpoint") and variable_of("checkpoint") not in os.environ:
        raise InputError(
            "checkpoint",
            f"the checkpoint is missing: vitserve {command} CHECKPOINT, such as {command} bundled",
        )


def add_setting_flags(parser: argparse.ArgumentParser, names: Iterable[str] = MODEL_FLAGS) -> None:
    """Add a flag for each of these settings, with its environment variable in the help."""
    for name in names:
        meaning, default = described(name)
        is_switch = settings_class().model_fields[name].annotation is bool
        shown = f"{meaning}. Default: {default}. [{variable_of(name)}]"
        parser.add_argument(
            flag_of(name),
            dest=name,
            nargs="?" if is_switch else None,
            const="true" if is_switch else None,
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=shown.replace("%", "%%"),
        )


def described(name: str) -> tuple[str, str]:
    """Return the meaning of a setting, and its default in words or `none`."""
    field = settings_class().model_fields[name]
    meaning, _, default = (field.description or name.replace("_", " ")).partition(". Default: ")
    notes = [extension.notes[name] for extension in extensions() if name in extension.notes]
    meaning = "; ".join([meaning, *notes])
    value = field.get_default(call_default_factory=True)
    if isinstance(value, ByteSize):
        default = f"{value // 2**20}MiB"
    elif value is not None and value != () and not default:
        default = str(value)
        if isinstance(value, bool):
            default = default.lower()
    return meaning, default or "none"


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Build settings from flags and the environment.

    Raises:
        SettingsError: a value is wrong, or the name of a variable is misspelt.
    """
    flags = vars(arguments).items()
    names = settings_class().model_fields
    settings = load_settings({name: text for name, text in flags if name in names}, are_typed=True)
    check_variables(settings, {**os.environ, "VIT_API_KEY": ""})  # which belongs to --url
    return settings


def settings_of_one_model(arguments: argparse.Namespace) -> Settings:
    """Build settings of a command that loads one model; raises as `settings_from`.

    Raises:
        InputError: the environment names a folder of models, and nothing names one of them.
    """
    settings = settings_from(arguments)
    if settings.models is not None and "checkpoint" not in settings.model_fields_set:
        raise InputError(
            "checkpoint",
            f"VIT_MODELS={settings.models!r} has several models, and this command loads one: name "
            "its folder or file with --checkpoint, or unset VIT_MODELS",
        )
    return settings


def predictor_from(arguments: argparse.Namespace) -> tuple[Predictor, ModelInfo, Settings]:
    """Return a predictor that is ready to compute, the facts of its model, and its settings.

    Raises:
        InputError, SettingsError, CheckpointError, DeviceError: one line that says why the model
            does not load.
    """
    settings = settings_of_one_model(arguments)
    predictor, info = load_predictor(settings)
    if settings.compile == "auto" and predictor.device == "cpu":
        predictor.check()  # compiling takes longer than a few pictures on a CPU
    else:
        predictor.warm_up()
    return predictor, info, settings


def serve_command(checkpoint: Path) -> str:
    """Return the command line that serves a checkpoint with this installation."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "vitserve" else "vitserve"
    return shlex.join([program, "serve", "--checkpoint", str(checkpoint)])
