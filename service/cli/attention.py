"""`vitserve attention FILE|FOLDER... -o OUT`: maps of where the model looked, in-process or through a server."""

from __future__ import annotations

import argparse
import itertools
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
from service.cli.image_files import find_images, handle_answers, writing
from service.cli.server_flags import add_api_key_flag, client_of
from service.cli.setting_flags import add_setting_flags, predictor_from

_OPTIONS = ("method", "layer", "head", "fusion", "discard")
"""Arguments that say which map it is, and"""

_LOOK = ("overlay", "view", "smooth", "colorbar", "alpha", "colormap", "size")
"""how it is drawn, under the names that the service has for them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve attention`."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|FOLDER")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT", help="a folder; for one picture also a file, OUT.png or OUT.npy"
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
    to_a_folder = output is not None and (
        len(files) > 1 or arguments.paths[0].is_dir() or output.is_dir() or not output.suffix
    )
    if output is not None and not to_a_folder:
        numbers = numbers or output.suffix == ".npy"
        _require_place(output, ".npy" if numbers else ".png")
    if arguments.sheet is not None:
        _require_place(arguments.sheet, ".png")
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    choice = MapChoice(
        classes=arguments.classes,
        options={name: given[name] for name in _OPTIONS if name in given},
        look={name: given[name] for name in _LOOK if name in given},
        side_by_side=arguments.side_by_side,
        drawn=not numbers or arguments.sheet is not None,
        numbers=numbers,
    )
    name_of = _folder_names(output, ".npy" if numbers else ".png") if to_a_folder else lambda _: output
    answers = (_of_server if arguments.url else _in_process)(files, choice, arguments)
    writer = _Writer(name_of, numbers, arguments.sheet, len(files))
    code = handle_answers(answers, len(files), writer.write, "map")
    writer.save_sheet()
    return code


def _in_process(
    files: Sequence[Path], choice: MapChoice, arguments: argparse.Namespace
) -> Iterator[tuple[Path, FileMaps | str]]:
    return maps_in_process(files, choice, *predictor_from(arguments))


def _of_server(
    files: Sequence[Path], choice: MapChoice, arguments: argparse.Namespace
) -> Iterator[tuple[Path, FileMaps | str]]:
    with client_of(arguments) as client:
        yield from maps_of_server(files, choice, client)


class _Writer:
    """Writes each file's maps and the sheet of all, and prints a line for each file.

    Args:
        name_of: returns where the maps of a file go; None: nowhere but on the sheet.
        numbers: whether values are written, and not drawings.
        sheet: where the sheet goes, if there is one.
        count: of the files.
    """

    def __init__(self, name_of: Callable[[Path], Path | None], numbers: bool, sheet: Path | None, count: int) -> None:
        self._name_of, self._numbers = name_of, numbers
        self._sheet_file, self._count = sheet, count
        self._sheet: ContactSheet | None = None

    def write(self, file: Path, answer: FileMaps | str) -> None:
        """Write the maps of a file, or print why it has none."""
        if isinstance(answer, str):
            tqdm.write(f"vitserve: {file}: {answer}", file=sys.stderr)
            return
        target = self._name_of(file)
        if target is not None and self._numbers:
            assert answer.values is not None, "the numbers were asked for"
            with writing(target), target.open("wb") as opened:
                np.save(opened, answer.values, allow_pickle=False)
        elif target is not None:
            assert answer.drawing is not None, "a drawing was asked for"
            _save(answer.drawing, target)
        if self._sheet_file is not None and answer.drawing is not None:
            self._sheet = self._sheet or ContactSheet(self._count, answer.drawing.size)
            self._sheet.add(answer.drawing, file.name, f"{answer.score:.0%} {answer.label}")
        facts = f", {answer.facts}" if answer.facts else ""
        tqdm.write(f"{target or file}: {answer.label} ({answer.score:.1%}){facts}", file=sys.stdout)

    def save_sheet(self) -> None:
        """Write the sheet, unless no file has a map."""
        if self._sheet_file is not None and self._sheet is not None:
            _save(self._sheet.image, self._sheet_file)


def _require_place(file: Path, suffix: str) -> None:
    if file.is_dir() or not file.parent.is_dir():
        raise InputError("output", f"{file}: not a file in a folder that exists")
    if file.suffix.lower() != suffix:
        raise InputError("output", f"{file}: expected a name that ends in {suffix}, which is what is written")


def _folder_names(folder: Path, suffix: str) -> Callable[[Path], Path]:
    """Make the folder, and return a function that names a new file in it for each picture."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError("output", f"{folder}: {error.strerror}") from None
    taken: set[Path] = set()

    def name_of(picture: Path) -> Path:
        # `.heat` keeps a map from taking its picture's place where both are in one folder; -2, -3, ... follow the names
        # of pictures that are called alike, in several folders.
        numbers = ("" if number == 1 else f"-{number}" for number in itertools.count(1))
        names = (folder / f"{picture.stem}{number}.heat{suffix}" for number in numbers)
        target = next(name for name in names if name not in taken)
        taken.add(target)
        return target

    return name_of


def _save(drawing: Image.Image, target: Path) -> None:
    with writing(target):
        drawing.save(target, "PNG", compress_level=4)
