"""`vitserve attention FILE|FOLDER... -o OUT`: maps of where the model looked, in-process or through a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from model.errors import InputError
from model.images.heatmap import COLORMAPS, MAX_SIZE
from model.images.sheet import ContactSheet
from model.prediction import FUSIONS, METHODS
from service.cli.file_maps import FileMaps, MapChoice, maps_in_process, maps_of_server
from service.cli.image_files import find_images
from service.cli.server_flags import add_api_key_flag, api_key_for, asking
from service.cli.setting_flags import add_setting_flags, predictor_from
from vitserve.client import Client

_LOOK = ("overlay", "view", "smooth", "colorbar", "alpha", "colormap", "size")
"""Arguments that say how a map is drawn, under the names that the service has for them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve attention`."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|FOLDER")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT", help="one picture: PNG, or .npy for the numbers; several: a folder"
    )
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="all of them small, with labels, in one PNG")
    parser.add_argument("--npy", action="store_true", help="write the numbers instead of a PNG")
    parser.add_argument(
        "--method",
        help=f"one of {', '.join(METHODS)} (default: {METHODS[0]}; with --layer or --head, cls; with --fusion or "
        "--discard, rollout)",
    )
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        default=[],
        metavar="CLASS",
        help="label or index to explain, several with commas: maps side by side (default: the best class)",
    )
    parser.add_argument("--layer", type=int, help="of method cls; negatives count from the end (default: the last)")
    parser.add_argument("--head", help="of method cls: mean, max, or a head's number (default: mean)")
    parser.add_argument("--fusion", choices=FUSIONS, help="of method rollout: how heads are combined (default: mean)")
    parser.add_argument("--discard", type=float, help="of method rollout: share of weights set to zero (default: 0)")
    parser.add_argument("--view", choices=("input", "photo"), help="what the model saw (default), or the whole photo")
    parser.add_argument("--side-by-side", action="store_true", help="the picture beside its map")
    parser.add_argument("--no-overlay", dest="overlay", action="store_const", const=False, help="the map alone")
    parser.add_argument("--no-smooth", dest="smooth", action="store_const", const=False, help="patches as squares")
    parser.add_argument("--colorbar", action="store_const", const=True, help="a colour bar with its scale")
    parser.add_argument("--alpha", type=float, help="weight of the map over the picture, 0 ... 1")
    parser.add_argument("--colormap", choices=COLORMAPS)
    parser.add_argument("--size", type=int, help=f"longer side in pixels, at most {MAX_SIZE}")
    parser.add_argument("--url", help="ask this server instead of loading the model here")
    add_api_key_flag(parser)
    add_setting_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the maps of everything that is named, and return 1 if any file has none; the others have theirs."""
    if arguments.size is not None and not 1 <= arguments.size <= MAX_SIZE:
        raise InputError("size", f"--size {arguments.size}: expected 1 ... {MAX_SIZE}")
    if arguments.alpha is not None and not 0 <= arguments.alpha <= 1:
        raise InputError("alpha", f"--alpha {arguments.alpha}: expected 0 ... 1")
    if arguments.output is None and arguments.sheet is None:
        raise InputError("output", "say where to write: -o, --sheet or both")
    files = find_images(arguments.paths)
    output, numbers = arguments.output, arguments.npy
    to_a_folder = output is not None and (len(files) > 1 or arguments.paths[0].is_dir() or output.is_dir())
    if output is not None and not to_a_folder:
        numbers = numbers or output.suffix == ".npy"
        _require_place(output, ".npy" if numbers else ".png")
    if arguments.sheet is not None:
        _require_place(arguments.sheet, ".png")
    choice = MapChoice(
        method=arguments.method,
        classes=arguments.classes,
        layer=arguments.layer,
        head=arguments.head,
        fusion=arguments.fusion,
        discard=arguments.discard,
        look={name: vars(arguments)[name] for name in _LOOK if vars(arguments)[name] is not None},
        side_by_side=arguments.side_by_side,
        drawn=not numbers or arguments.sheet is not None,
        numbers=numbers,
    )
    name_of = _folder_names(output, ".npy" if numbers else ".png") if to_a_folder else lambda _: output
    answers = (_of_server if arguments.url else _in_process)(files, choice, arguments)
    return _write_all(answers, len(files), name_of, numbers, arguments.sheet)


def _write_all(
    answers: Iterator[FileMaps],
    count: int,
    name_of: Callable[[Path], Path | None],
    numbers: bool,
    sheet_file: Path | None,
) -> int:
    """Write each file's maps and then the sheet of all, and print a line for each; return the exit code."""
    sheet: ContactSheet | None = None
    failed = 0
    for answer in tqdm(answers, total=count, unit="image", disable=count < 2 or None):
        if answer.error is not None:
            failed += 1
            tqdm.write(f"vitserve: {answer.file}: {answer.error}", file=sys.stderr)
            continue
        target = name_of(answer.file)
        if target is not None:
            _write(answer, target, numbers)
        if sheet_file is not None and answer.drawing is not None:
            sheet = sheet or ContactSheet(count, answer.drawing.size)
            sheet.add(answer.drawing, answer.file.name, f"{answer.score:.0%} {answer.label}")
        facts = f", {answer.facts}" if answer.facts else ""
        tqdm.write(f"{target or answer.file}: {answer.label} ({answer.score:.1%}){facts}", file=sys.stdout)
    if sheet_file is not None and sheet is not None:
        _save(sheet.image, sheet_file)
    if failed and count > 1:
        print(f"vitserve: {failed} of {count} files have no map", file=sys.stderr)  # noqa: T201
    return int(failed > 0)


def _in_process(files: Sequence[Path], choice: MapChoice, arguments: argparse.Namespace) -> Iterator[FileMaps]:
    return maps_in_process(files, choice, *predictor_from(arguments))


def _of_server(files: Sequence[Path], choice: MapChoice, arguments: argparse.Namespace) -> Iterator[FileMaps]:
    with (
        asking(arguments.url),
        Client(arguments.url, api_key=api_key_for(arguments.url, arguments.api_key)) as client,
    ):
        yield from maps_of_server(files, choice, client)


def _require_place(file: Path, suffix: str) -> None:
    if file.is_dir() or not file.parent.is_dir():
        raise InputError("output", f"{file}: not a file in a folder that exists")
    if file.suffix.lower() not in ("", suffix):
        raise InputError("output", f"{file}: what is written is {suffix}")


def _folder_names(folder: Path, suffix: str) -> Callable[[Path], Path]:
    """Make the folder, and return a function that names a new file in it for each picture."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError("output", f"{folder}: {error.strerror}") from None
    taken: set[Path] = set()

    def name_of(picture: Path) -> Path:
        # `.heat` keeps a map from taking its picture's place where both are in one folder.
        names = (folder / f"{picture.stem}{number}.heat{suffix}" for number in _numbers())
        target = next(name for name in names if name not in taken)
        taken.add(target)
        return target

    return name_of


def _numbers() -> Iterator[str]:
    """Give nothing, and then -2, -3, ..., for pictures of one name from several folders."""
    yield ""
    number = 2
    while True:
        yield f"-{number}"
        number += 1


def _write(answer: FileMaps, target: Path, numbers: bool) -> None:
    if not numbers:
        assert answer.drawing is not None, "a drawing was asked for"
        _save(answer.drawing, target)
        return
    assert answer.values is not None, "the numbers were asked for"
    try:
        with target.open("wb") as file:
            np.save(file, answer.values, allow_pickle=False)
    except OSError as error:
        raise InputError("output", f"{target}: {error.strerror}") from None


def _save(drawing: Image.Image, target: Path) -> None:
    try:
        drawing.save(target, "PNG", compress_level=4)
    except OSError as error:
        raise InputError("output", f"{target}: {error.strerror}") from None
