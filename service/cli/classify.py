"""`vitserve classify FILE|FOLDER...`: labels of files, in-process or through a server."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from model.errors import InputError
from model.prediction import RequestedOutputs
from service.cli.image_files import find_images
from service.cli.predictions import predict_files
from service.cli.server_flags import add_api_key_flag, api_key_for, asking, while_reachable
from service.cli.setting_flags import add_setting_flags, predictor_from
from vitserve.client import Client
from vitserve.documents import Prediction

_DEFAULT_TOP_K = 5


@dataclass(frozen=True, slots=True)
class ClassifiedFile:
    """One file's predictions, or the error that left it without any."""

    file: Path
    predictions: list[Prediction]
    error: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve classify`."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|FOLDER")
    parser.add_argument("--top-k", type=int, metavar="N", help=f"classes of each picture (default: {_DEFAULT_TOP_K})")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV: file, rank, label, index, score, error")
    form.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--url", help="ask this server instead of loading the model here")
    add_api_key_flag(parser)
    add_setting_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Classify everything that is named, and return 1 if any file has no answer; the others have theirs."""
    if arguments.top_k is not None and arguments.top_k < 1:
        raise InputError("top_k", f"--top-k {arguments.top_k}: expected at least 1")
    files = find_images(arguments.paths)
    answers = _ask_server(files, arguments) if arguments.url else _ask_model(files, arguments)
    write = _writer(arguments)
    failed = 0
    for answer in tqdm(answers, total=len(files), unit="image", disable=len(files) < 2 or None):
        write(answer)
        failed += answer.error is not None
    if failed:
        print(f"vitserve: {failed} of {len(files)} files have no answer", file=sys.stderr)  # noqa: T201
    return int(failed > 0)


def _ask_model(files: list[Path], arguments: argparse.Namespace) -> Iterator[ClassifiedFile]:
    predictor, info, settings = predictor_from(arguments)
    requested = RequestedOutputs(_top_k(arguments.top_k, info.config.num_classes))
    for file, outputs in predict_files(files, requested, predictor, info, settings):
        if isinstance(outputs, str):
            yield ClassifiedFile(file, [], outputs)
        else:
            yield ClassifiedFile(
                file, Prediction.ranked(info.labels, outputs.indices.tolist(), outputs.scores.tolist())
            )


def _ask_server(files: list[Path], arguments: argparse.Namespace) -> Iterator[ClassifiedFile]:
    with (
        asking(arguments.url),
        Client(arguments.url, api_key=api_key_for(arguments.url, arguments.api_key)) as client,
    ):
        top_k = _top_k(arguments.top_k, client.model().classes)
        answers = client.stream(files, partial(client.classify, top_k=top_k))
        for file, answer in while_reachable(answers, len(files)):
            if isinstance(answer, Exception):
                yield ClassifiedFile(file, [], str(answer))
            else:
                yield ClassifiedFile(file, answer.predictions)


def _top_k(requested: int | None, classes: int) -> int:
    """Return how many classes an answer has, and say so where the model has fewer than requested."""
    if requested is not None and requested > classes:
        print(f"vitserve: --top-k {requested}: the model has {classes} classes", file=sys.stderr)  # noqa: T201
    return min(requested or _DEFAULT_TOP_K, classes)


def _writer(arguments: argparse.Namespace) -> Callable[[ClassifiedFile], None]:
    """Return a function that prints an answer in the form that the arguments choose."""
    if not arguments.csv:
        form = _json if arguments.json else _text
        return lambda answer: tqdm.write(form(answer), file=sys.stdout)
    table = csv.writer(sys.stdout)
    table.writerow(["file", "rank", "label", "index", "score", "error"])
    return lambda answer: _write_csv(answer, table)


def _write_csv(answer: ClassifiedFile, table: Any) -> None:
    if answer.error is not None:
        table.writerow([answer.file, "", "", "", "", answer.error])
    for rank, prediction in enumerate(answer.predictions, start=1):
        table.writerow([answer.file, rank, prediction.label, prediction.index, prediction.score, ""])


def _json(answer: ClassifiedFile) -> str:
    predictions = [prediction.model_dump() for prediction in answer.predictions]
    outcome = {"predictions": predictions} if answer.error is None else {"error": answer.error}
    return json.dumps({"file": str(answer.file), **outcome}, ensure_ascii=False)


def _text(answer: ClassifiedFile) -> str:
    lines = [f"{prediction.score:8.2%}  {prediction.label}" for prediction in answer.predictions]
    return "\n".join([str(answer.file), *lines, *([f"  error: {answer.error}"] if answer.error else [])])
