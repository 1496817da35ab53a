"""`vitserve classify FILE|FOLDER...`: labels of files, in-process or through a server."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from model.errors import InputError
from model.images.preprocess import ModelInput
from model.outputs import DEFAULT_TOP_K, Outputs, RequestedOutputs
from model.zero_shot import is_list, labels_of_request, parse_labels
from service.cli.image_files import find_images, handle_answers, predict_files
from service.cli.server_flags import add_server_flags, client_of, stream_answers
from service.cli.setting_flags import MODEL_FLAGS, add_setting_flags, predictor_from
from vitserve.documents import Prediction, SetFields, set_fields


@dataclass(frozen=True)
class Classes:
    """A file's predictions, and its set of labels where the model has a coverage."""

    predictions: list[Prediction]
    set: SetFields


Answer = Classes | str
"""A file's classes, or why it has none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve classify`."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|FOLDER")
    parser.add_argument("--top-k", type=int, metavar="N", help=f"classes of each picture (default: {DEFAULT_TOP_K})")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--csv", action="store_true", help="print CSV: file, rank, label, index, score, error, set, set_size, abstained"
    )
    form.add_argument("--json", action="store_true", help="print one JSON object a line")
    add_server_flags(parser)
    add_setting_flags(parser, (*MODEL_FLAGS, "coverage"))


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
    top_k = _top_k(arguments.top_k, info.config.num_classes)
    requested = RequestedOutputs(top_k, label_set=info.coverage is not None)

    def answer(_: Path, __: ModelInput, outputs: list[Outputs]) -> Answer:
        [each] = outputs
        predictions = Prediction.ranked(info.labels, each.indices.tolist(), each.scores.tolist())
        label_set = None if each.label_set is None else each.label_set.tolist()
        return Classes(predictions, set_fields(info.labels, label_set))

    return predict_files(files, [requested], answer, predictor, info, settings)


def _through_server(files: list[Path], arguments: argparse.Namespace) -> Iterator[tuple[Path, Answer]]:
    with client_of(arguments) as client:
        text = getattr(arguments, "labels", "")
        labels = parse_labels(text, "--labels") if is_list(text) else None
        top_k = _top_k(arguments.top_k, len(labels) if labels else client.model().classes)

        def ask(file: Path) -> Answer:
            answer = client.classify(file, top_k=top_k, labels=labels)
            fields = answer.model_dump(include=set(SetFields.__annotations__), exclude_none=True)
            return Classes(answer.predictions, cast(SetFields, fields))

        yield from stream_answers(files, client, ask)


def _top_k(requested: int | None, classes: int) -> int:
    """Return how many classes an answer has, and say so where the model has fewer than requested."""
    if requested is not None and requested > classes:
        print(f"vitserve: --top-k {requested}: the model has {classes} classes", file=sys.stderr)  # noqa: T201
    return min(requested or DEFAULT_TOP_K, classes)


def _writer(arguments: argparse.Namespace) -> Callable[[Path, Answer], object]:
    """Return a function that prints a file's answer in the form that the arguments choose."""
    if not arguments.csv:
        form = _json if arguments.json else _text
        return lambda file, answer: tqdm.write(form(file, answer), file=sys.stdout)
    table = csv.writer(sys.stdout)
    table.writerow(["file", "rank", "label", "index", "score", "error", *SetFields.__annotations__])
    return lambda file, answer: table.writerows(_rows(file, answer))


def _rows(file: Path, answer: Answer) -> list[list[Any]]:
    if isinstance(answer, str):
        return [[file, "", "", "", "", answer, "", "", ""]]
    fields = answer.set
    label_set = ["; ".join(fields.get("set", [])), fields.get("set_size", ""), fields.get("abstained", "")]
    ranked = enumerate(answer.predictions, start=1)
    return [[file, rank, each.label, each.index, each.score, "", *label_set] for rank, each in ranked]


def _json(file: Path, answer: Answer) -> str:
    if isinstance(answer, str):
        outcome: dict[str, Any] = {"error": answer}
    else:
        outcome = {"predictions": [each.model_dump() for each in answer.predictions], **answer.set}
    return json.dumps({"file": str(file), **outcome}, ensure_ascii=False)


def _text(file: Path, answer: Answer) -> str:
    if isinstance(answer, str):
        return f"{file}\n  error: {answer}"
    return "\n".join([str(file), *(f"{each.score:8.2%}  {each.label}" for each in answer.predictions), *_set(answer)])


def _set(answer: Classes) -> list[str]:
    """Return the line that says which labels hold the right one, where the model has a coverage."""
    match answer.set:
        case {"abstained": True}:
            return ["  abstained: unlike the pictures of its classes"]
        case {"set": labels}:
            return [f"  one of: {'; '.join(labels)}"]
        case {"set_size": size}:
            return [f"  one of {size} labels"]
    return []
