"""`vitserve embed FILE|FOLDER... -o features.npy`: the embeddings of files, in-process or through a server."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.errors import InputError
from model.prediction import POOLINGS, RequestedOutputs, parse_embedding
from service.cli.image_files import find_images
from service.cli.predictions import predict_files
from service.cli.server_flags import add_api_key_flag, api_key_for, asking, while_reachable
from service.cli.setting_flags import add_setting_flags, predictor_from
from vitserve.client import Client


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
    parser.add_argument("--url", help="ask this server instead of loading the model here")
    add_api_key_flag(parser)
    add_setting_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write what is asked for, and return 1 if any file has no embedding; the others have theirs."""
    output: Path = arguments.output
    if output.suffix != ".npy" or not output.parent.is_dir():
        raise InputError("output", f"{output}: expected a name that ends in .npy, in a folder that exists")
    files = find_images(arguments.paths)
    answers = _ask_server(files, arguments) if arguments.url else _ask_model(files, arguments)
    named: list[Path] = []
    rows: list[NDArray[np.float32]] = []
    for file, found in tqdm(answers, total=len(files), unit="image", disable=len(files) < 2 or None):
        if isinstance(found, str):
            tqdm.write(f"vitserve: {file}: {found}", file=sys.stderr)
        else:
            named.append(file)
            rows.append(found)
    if rows:
        _write(output, named, rows)
    failed = len(files) - len(rows)
    if failed:
        print(f"vitserve: {failed} of {len(files)} files have no embedding", file=sys.stderr)  # noqa: T201
    return int(failed > 0)


def _write(output: Path, files: list[Path], rows: list[NDArray[np.float32]]) -> None:
    np.save(output, np.stack(rows), allow_pickle=False)
    with output.with_suffix(".csv").open("w", newline="", encoding="utf-8") as names:
        table = csv.writer(names)
        table.writerow(["row", "file"])
        table.writerows(enumerate(files))


def _ask_model(files: list[Path], arguments: argparse.Namespace) -> Iterator[tuple[Path, NDArray[np.float32] | str]]:
    predictor, info, settings = predictor_from(arguments)
    requested = RequestedOutputs(1, embedding=parse_embedding(info.config, arguments.pool, arguments.normalize))
    for file, found in predict_files(files, requested, predictor, info, settings):
        if isinstance(found, str):
            yield file, found
        elif not found.finite or found.embedding is None:
            yield file, "the model gives values that are not finite"
        else:
            yield file, found.embedding


def _ask_server(files: list[Path], arguments: argparse.Namespace) -> Iterator[tuple[Path, NDArray[np.float32] | str]]:
    with (
        asking(arguments.url),
        Client(arguments.url, api_key=api_key_for(arguments.url, arguments.api_key)) as client,
    ):
        client.model()
        embed = partial(client.embed, pool=arguments.pool, normalize=arguments.normalize)
        for file, found in while_reachable(client.stream(files, embed), len(files)):
            yield file, str(found) if isinstance(found, Exception) else found
