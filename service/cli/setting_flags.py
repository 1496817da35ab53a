"""Settings as flags of the subcommands, and the warm predictor that they describe."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.errors import InputError
from service.engine.loading import load_predictor
from service.engine.messages import ModelInfo
from service.settings import ENV_PREFIX, Settings, described, load_settings

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


class _Checkpoint(argparse.Action):
    """Stores the checkpoint, which may be given as the argument or as `--checkpoint`, but not as
    both.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, values)
        if before != values:
            parser.error(f"two checkpoints are given, {before} and {values}; give one")
        setattr(namespace, self.dest, values)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint as an argument, which `--checkpoint` names as well; neither:
    VIT_CHECKPOINT counts.
    """
    parser.add_argument(
        "checkpoint",
        nargs="?",
        action=_Checkpoint,
        default=argparse.SUPPRESS,
        metavar="CHECKPOINT",
        help="a folder, a file, a hub id or `bundled` (docs/checkpoints.md)",
    )
    add_setting_flags(parser, ["checkpoint"])


def require_checkpoint(arguments: argparse.Namespace, command: str) -> None:
    """Raise `InputError` if neither the arguments nor the environment name a checkpoint."""
    if not hasattr(arguments, "checkpoint") and f"{ENV_PREFIX}CHECKPOINT" not in os.environ:
        raise InputError(
            "checkpoint",
            f"no checkpoint is given: vitserve {command} CHECKPOINT, as in {command} bundled",
        )


def add_setting_flags(parser: argparse.ArgumentParser, names: Iterable[str] = MODEL_FLAGS) -> None:
    """Add a flag for each of these settings; each is an environment variable too."""
    for name in names:
        meaning, default = described(name)
        shown = f"{meaning}. Default: {default}. [{ENV_PREFIX}{name.upper()}]"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            action=_Checkpoint if name == "checkpoint" else "store",
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=shown.replace("%", "%%"),
        )


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Build settings from the given flags and the environment; raises `SettingsError` when a value
    is not allowed.
    """
    return load_settings(
        {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    )


def predictor_from(arguments: argparse.Namespace) -> tuple[Predictor, ModelInfo, Settings]:
    """Return a predictor that computes, the facts of its model, and the settings that it was made
    from.

    Raises:
        SettingsError, CheckpointError, DeviceError: one line that says why not.
    """
    settings = settings_from(arguments)
    predictor, info = load_predictor(settings)
    if (
        settings.compile == "auto" and predictor.device == "cpu"
    ):  # what few pictures do not need is not compiled
        predictor.check()
    else:
        predictor.warm_up()
    return predictor, info, settings


def serve_command(checkpoint: Path) -> str:
    """Return the command line that serves a checkpoint with this installation."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "vitserve" else "vitserve"
    return shlex.join([program, "serve", "--checkpoint", str(checkpoint)])
