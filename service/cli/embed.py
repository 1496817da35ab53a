"""`vitserve embed FILE|FOLDER... -o OUT.npy`: embeddings of files, in-process or from a server."""

import argparse
import csv
from pathlib import Path
from typing import Final

import numpy as np

from model.errors import InputError
from model.label_texts import table_cell
from model.outputs import POOLINGS
from service.cli.answers import Embedding, add_server_flags, answers_from, handle_answers
from service.cli.image_files import (
    add_output_flag,
    find_images,
    require_output_file,
    writing,
)
from service.cli.setting_flags import add_setting_flags

_COLUMNS: Final = ("row", "file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve embed`."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|FOLDER")
    add_output_flag(
        parser,
        "FILE.npy",
        "float32 [files, D]; FILE.csv in the same folder names the file of each row",
        required=True,
    )
    parser.add_argument(
        "--pool",
        choices=POOLINGS,
        default=POOLINGS[0],
        help="head: the features of the classifier; cls: the CLS token; mean: the mean of the "
        f"patches; transfer: the features of taught heads (default: {POOLINGS[0]})",
    )
    parser.add_argument(
        "--normalize", action="store_true", help="divide each embedding by its L2 norm"
    )
    add_server_flags(parser)
    add_setting_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the embeddings of all files, and return 1 if any file fails."""
    output: Path = arguments.output
    require_output_file(output, ".npy")
    table = output.with_suffix(".csv")
    _require_own_table(table)
    files = find_images(arguments.paths)
    rows: list[tuple[Path, Embedding]] = []
    with answers_from(arguments) as source:
        answers = source.embed(files, arguments.pool, arguments.normalize)
        code = handle_answers(
            answers, len(files), lambda file, row: rows.append((file, row)), "embedding"
        )
    if rows:
        with writing(output), output.open("wb") as stream:
            np.save(stream, np.stack([row for _, row in rows]), allow_pickle=False)
        with (
            writing(table),
            table.open("w", newline="", encoding="utf-8", errors="surrogateescape") as names,
        ):
            files_of_rows = enumerate(table_cell(file) for file, _ in rows)
            csv.writer(names).writerows([_COLUMNS, *files_of_rows])
    return code


def _require_own_table(table: Path) -> None:
    """Raise `InputError` if the path has a file that an earlier run did not write."""
    if not table.exists():
        return
    with writing(table), table.open("rb") as file:
        is_own = file.readline().rstrip() == ",".join(_COLUMNS).encode()
    if not is_own:
        raise InputError(
            "output", f"{table}: exists, and would be replaced: name another FILE.npy, or move it"
        )
