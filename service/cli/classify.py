"""`vitserve classify FILE|FOLDER...`: labels of files, in-process or through a server."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from model.errors import InputError
from model.images.preprocess import ModelInput
from model.outputs import Outputs, RequestedOutputs
from model.zero_shot import is_list, labels_of_request, parse_labels
from service.cli.image_files import find_images, handle_answers, predict_files
from service.cli.server_flags import add_api_key_flag, client_of, stream_answers
from service.cli.setting_flags import add_setting_flags, predictor_from
from vitserve.documents import Prediction

_DEFAULT_TOP_K = 5

Answer = list[Prediction] | str
"""A file's predictions, or why it has none."""


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
    answers = (_through_server if arguments.url else _in_process)(files, arguments)
    return handle_answers(answers, len(files), _writer(arguments), "answer")


def _in_process(files: list[Path], arguments: argparse.Namespace) -> Iterator[tuple[Path, Answer]]:
    predictor, info, settings = predictor_from(arguments)
    labels_of_request(None, info.zero_shot, info.config)
    requested = RequestedOutputs(_top_k(arguments.top_k, info.config.num_classes))

    def answer(_: Path, __: ModelInput, outputs: list[Outputs]) -> Answer:
        return Prediction.ranked(info.labels, outputs[0].indices.tolist(), outputs[0].scores.tolist())

    return predict_files(files, [requested], answer, predictor, info, settings)


def _through_server(files: list[Path], arguments: argparse.Namespace) -> Iterator[tuple[Path, Answer]]:
    with client_of(arguments) as client:
        text = getattr(arguments, "labels", "")
        labels = parse_labels(text, "--labels") if is_list(text) else None
        top_k = _top_k(arguments.top_k, len(labels) if labels else client.model().classes)
        yield from stream_answers(
            files, client, lambda file: client.classify(file, top_k=top_k, labels=labels).predictions
        )


def _top_k(requested: int | None, classes: int) -> int:
    """Return how many classes an answer has, and say so where the model has fewer than requested."""
    if requested is not None and requested > classes:
        print(f"vitserve: --top-k {requested}: the model has {classes} classes", file=sys.stderr)  # noqa: T201
    return min(requested or _DEFAULT_TOP_K, classes)


def _writer(arguments: argparse.Namespace) -> Callable[[Path, Answer], object]:
    """Return a function that prints a file's answer in the form that the arguments choose."""
    if not arguments.csv:
        form = _json if arguments.json else _text
        return lambda file, answer: tqdm.write(form(file, answer), file=sys.stdout)
    table = csv.writer(sys.stdout)
    table.writerow(["file", "rank", "label", "index", "score", "error"])
    return lambda file, answer: table.writerows(_rows(file, answer))


def _rows(file: Path, answer: Answer) -> list[list[Any]]:
    if isinstance(answer, str):
        return [[file, "", "", "", "", answer]]
    return [[file, rank, each.label, each.index, each.score, ""] for rank, each in enumerate(answer, start=1)]


def _json(file: Path, answer: Answer) -> str:
    outcome = {"error": answer} if isinstance(answer, str) else {"predictions": [each.model_dump() for each in answer]}
    return json.dumps({"file": str(file), **outcome}, ensure_ascii=False)


def _text(file: Path, answer: Answer) -> str:
    if isinstance(answer, str):
        return f"{file}\n  error: {answer}"
    return "\n".join([str(file), *(f"{each.score:8.2%}  {each.label}" for each in answer)])
