"""`vitserve inspect CHECKPOINT`: what was understood of a checkpoint, without serving it."""

from __future__ import annotations

import argparse
from typing import Any

from service.commands.model_flags import CHECKPOINT_FLAGS, add_model_flags, settings_from
from service.loading import checkpoint_from


def add_parser(commands: Any) -> None:
    """Flags of `vitserve inspect`."""
    parser = commands.add_parser("inspect", help="print what a checkpoint is")
    parser.add_argument("checkpoint", nargs="?", default="bundled", help="as `vitserve serve --checkpoint` takes it")
    add_model_flags(parser, CHECKPOINT_FLAGS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the checkpoint as the service does, weights and all, and print it.

    Raises:
        CheckpointError: it cannot be read exactly.
    """
    from model.summary import summarise  # noqa: PLC0415  torch takes seconds to import

    checkpoint = checkpoint_from(settings_from(arguments))
    checkpoint.build()  # names, shapes and values of the weights are checked here
    rows = summarise(checkpoint)
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")  # noqa: T201
    return 0
