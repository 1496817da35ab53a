"""`vitserve classify FILE|FOLDER...`: labels of files, in-process or through a server."""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from model.label_texts import table_cell
from model.outputs import DEFAULT_TOP_K
from service.cli.answers import SET_FIELDS, add_server_flags, answers_from, handle_answers
from service.cli.image_files import find_images
from service.cli.setting_flags import MODEL_FLAGS, add_setting_flags

Answer = dict[str, Any]
"""A file's `predictions`, with the fields of its label set if the model has a coverage."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve classify`."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|FOLDER")
    parser.add_argument(
        "--top-k", type=int, metavar="N", help=f"classes of each picture (default: {DEFAULT_TOP_K})"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--csv",
        action="store_true",
        help=f"print CSV: file, rank, label, index, score, error, {', '.join(SET_FIELDS)}",
    )
    form.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_server_flags(parser)
    add_setting_flags(parser, (*MODEL_FLAGS, "coverage"))


def run(arguments: argparse.Namespace) -> int:
    """Print the labels of all files, and return 1 if any file fails."""
    files = find_images(arguments.paths)
    with answers_from(arguments, sent_settings=["labels"]) as source:
        answers = source.classify(files, arguments.top_k)
        write = _writer(arguments)
        return handle_answers(
            answers,
            len(files),
            write,
            "answer",
            failure=lambda file, reason: write(file, {"error": reason}),
        )


def _writer(arguments: argparse.Namespace) -> Callable[[Path, Answer], object]:
    """Return a function that prints a file's answer in the form that the arguments choose."""
    if arguments.json:
        return lambda file, answer: tqdm.write(_json({"file": str(file), **answer}), sys.stdout)
    if not arguments.csv:
        return lambda file, answer: tqdm.write(_text(file, answer), sys.stdout)
    columns = ["file", "rank", "label", "index", "score", "error", *SET_FIELDS]
    table = csv.DictWriter(sys.stdout, columns)
    table.writeheader()
    return lambda file, answer: table.writerows(
        {name: table_cell(value) for name, value in row.items()} for row in _rows(file, answer)
    )


def _json(answer: Answer) -> str:
    """Return an answer as JSON; escape all characters unless standard output can encode them."""
    text = json.dumps(answer, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return json.dumps(answer)
    return text


def _rows(file: Path, answer: Answer) -> Iterator[dict[str, Any]]:
    if "error" in answer:
        yield {"file": file, **answer}
        return
    fields: Answer = {
        name: "; ".join(answer[name]) if name == "set" else answer[name]
        for name in SET_FIELDS
        if name in answer
    }
    for rank, prediction in enumerate(answer["predictions"], start=1):
        yield {"file": file, "rank": rank, **prediction, **fields}


_ABSTENTIONS: Final = {
    "coverage": "unlike the pictures of its classes",
    "distance": "unlike all its examples",
    "min_score": "every score is below its threshold",
}


def _text(file: Path, answer: Answer) -> str:
    if "error" in answer:
        return f"{file}\n  error: {answer['error']}"
    lines = [
        str(file),
        *(f"{best['score']:8.2%}  {best['label']}" for best in answer["predictions"]),
    ]
    if answer.get("abstained"):
        lines.append(f"  abstained: {_ABSTENTIONS[answer.get('abstained_by', 'coverage')]}")
    elif "set" in answer:
        lines.append(f"  one of: {'; '.join(answer['set'])}")
    elif "set_size" in answer:
        lines.append(f"  one of {answer['set_size']} labels")
    return "\n".join(lines)
