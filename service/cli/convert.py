"""`vitserve convert CHECKPOINT -o DIR`: any checkpoint that is read, as a native folder."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from model.errors import InputError
from service.cli.image_files import require_empty, writing
from service.cli.setting_flags import CHECKPOINT_FLAGS, add_setting_flags, serve_command, settings_from
from service.engine.loading import checkpoint_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve convert`."""
    parser.add_argument("checkpoint", help="as `vitserve serve --checkpoint` takes it")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="made if absent")
    parser.add_argument(
        "--stored-dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="of the stored weights; half precision halves the file and rounds them (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("int8",),
        default=argparse.SUPPRESS,
        help="find out, too, how OpenVINO computes it in int8 and agrees with float32 as often as VIT_AGREEMENT says",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="pictures to calibrate int8 on and to measure it with")
    add_setting_flags(parser, (*CHECKPOINT_FLAGS, "agreement"))


def run(arguments: argparse.Namespace) -> int:
    """Read a checkpoint, check its weights, and write it as a native folder."""
    from model.checkpoint import native  # noqa: PLC0415  torch takes seconds to import
    from model.runtime.device import DTYPES  # noqa: PLC0415

    settings = settings_from(arguments)
    pictures = _pictures(arguments)
    checkpoint = checkpoint_from(settings)
    checkpoint.network()  # names, shapes and values of the weights are checked here
    require_empty(arguments.output)
    with writing(arguments.output):
        native.write(arguments.output, checkpoint, dtype=DTYPES[arguments.stored_dtype])
    command = serve_command(arguments.output)
    if pictures is not None:
        from service.cli.quantised import add_int8  # noqa: PLC0415

        with writing(arguments.output):
            record = add_int8(arguments.output, pictures, settings.agreement)
        print(f"int8: {record.text}")  # noqa: T201
        if record.agreement < settings.agreement:
            lower = math.floor(record.agreement * 1000) / 1000
            print(f"int8 is not served while VIT_AGREEMENT is {settings.agreement:g}")  # noqa: T201
            print(f"more pictures may help; --agreement {lower:g} serves it as it is")  # noqa: T201
    print(f"{arguments.output}: {checkpoint.name}, {arguments.stored_dtype}; serve it with: {command}")  # noqa: T201
    return 0


def _pictures(arguments: argparse.Namespace) -> tuple[list[Path], list[Path]] | None:
    """Return the pictures for int8, or None where it is not asked for; refuse early what would fail late."""
    if "dtype" not in arguments:
        if arguments.data is not None:
            raise InputError("data", "--data is for --dtype int8")
        return None
    from model.runtime.openvino.backend import unsupported_reason  # noqa: PLC0415  torch takes seconds to import
    from service.cli.quantised import split_pictures  # noqa: PLC0415

    if reason := unsupported_reason("cpu", "float32"):
        raise InputError("dtype", f"int8: {reason}")
    if arguments.data is None:
        raise InputError("data", "--dtype int8 is calibrated on pictures: --data DIR")
    return split_pictures(arguments.data)
