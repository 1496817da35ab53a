"""`vitserve inspect CHECKPOINT`: a checkpoint's summary, without serving it."""

import argparse

from service.cli.setting_flags import (
    CHECKPOINT_FLAGS,
    add_checkpoint,
    add_setting_flags,
    settings_of_one_model,
)
from service.engine.checkpoint_files import checkpoint_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve inspect`."""
    add_checkpoint(parser)
    add_setting_flags(parser, CHECKPOINT_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Read a checkpoint, check its weights, and print a summary."""
    checkpoint = checkpoint_from(settings_of_one_model(arguments))
    checkpoint.network()  # names, shapes and values of the weights are checked here
    from model.extensions.evaluation.summary import summarise  # noqa: PLC0415  torch is slow

    rows = summarise(checkpoint)
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")
    return 0
