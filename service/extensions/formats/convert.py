"""`vitserve convert CHECKPOINT -o DIR`: write any readable checkpoint as a native folder."""

import argparse

from model.extensions.datasets.split_record import copy_record
from service.cli.image_files import add_output_flag, require_empty, writing
from service.cli.setting_flags import (
    CHECKPOINT_FLAGS,
    add_checkpoint,
    add_setting_flags,
    require_checkpoint,
    serve_command,
    settings_from,
)
from service.engine.checkpoint_files import checkpoint_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve convert`."""
    add_checkpoint(parser)
    add_output_flag(parser, "DIR", "created if absent", required=True)
    add_setting_flags(parser, CHECKPOINT_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Read a checkpoint, check its weights, and write it as a native folder."""
    require_checkpoint(arguments, "convert")
    from model.checkpoint import native  # noqa: PLC0415  torch takes seconds to import

    settings = settings_from(arguments)
    checkpoint = checkpoint_from(settings)
    checkpoint.network()  # names, shapes and values of the weights are checked here
    require_empty(arguments.output)
    with writing(arguments.output):
        native.write(arguments.output, checkpoint)
        copy_record(settings.checkpoint, arguments.output)
    print(
        f"{arguments.output}: {checkpoint.name}; serve it with: {serve_command(arguments.output)}"
    )
    return 0
