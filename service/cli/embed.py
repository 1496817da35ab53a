"""`vitserve embed FILE|FOLDER... -o features.npy`: the embeddings of files, in-process or through a server."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.errors import InputError
from model.images.preprocess import ModelInput
from model.outputs import POOLINGS, Outputs, RequestedOutputs, parse_embedding
from service.cli.image_files import find_images, handle_answers, predict_files, writing
from service.cli.server_flags import add_server_flags, client_of, stream_answers
from service.cli.setting_flags import add_setting_flags, predictor_from

Embedding = NDArray[np.float32]
"""Float32 [D]."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve embed`."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|FOLDER")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE.npy",
        help="float32 [files, D]; FILE.csv beside it names the file of each row",
    )
    parser.add_argument(
        "--pool",
        choices=POOLINGS,
        default=POOLINGS[0],
        help="what the head reads (default), the CLS token, or the mean of the patches",
    )
    parser.add_argument("--normalize", action="store_true", help="divide each embedding by its L2 norm")
    add_server_flags(parser)
    add_setting_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write what is asked for, and return 1 if any file has no embedding; the others have theirs."""
    output: Path = arguments.output
    if output.suffix != ".npy" or not output.parent.is_dir():
        raise InputError("output", f"{output}: expected a name that ends in .npy, in a folder that exists")
    files = find_images(arguments.paths)
    rows: list[tuple[Path, Embedding]] = []
    answers = (_through_server if arguments.url else _in_process)(files, arguments)
    code = handle_answers(answers, len(files), lambda file, row: rows.append((file, row)), "embedding")
    if rows:
        table = output.with_suffix(".csv")
        with writing(output):
            np.save(output, np.stack([row for _, row in rows]), allow_pickle=False)
        with writing(table), table.open("w", newline="", encoding="utf-8") as names:
            csv.writer(names).writerows([("row", "file"), *enumerate(file for file, _ in rows)])
    return code


def _in_process(files: list[Path], arguments: argparse.Namespace) -> Iterator[tuple[Path, Embedding | str]]:
    predictor, info, settings = predictor_from(arguments)
    requested = RequestedOutputs(1, embedding=parse_embedding(info.config, arguments.pool, arguments.normalize))

    def answer(_: Path, __: ModelInput, outputs: list[Outputs]) -> Embedding:
        assert outputs[0].embedding is not None, "it was requested"
        return outputs[0].embedding

    return predict_files(files, [requested], answer, predictor, info, settings)


def _through_server(files: list[Path], arguments: argparse.Namespace) -> Iterator[tuple[Path, Embedding | str]]:
    with client_of(arguments) as client:
        client.model()  # one error for all files where there is no service
        options = {"pool": arguments.pool, "normalize": arguments.normalize}
        yield from stream_answers(files, client, lambda file: client.embed(file, **options))
