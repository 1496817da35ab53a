"""`vitserve attention FILE|FOLDER... -o OUT`: maps of where the model looked."""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from PIL import Image
from tqdm import tqdm

from model.errors import ImageError, InputError
from model.images.heatmap import default_view
from model.images.listing import PICTURE_SUFFIXES
from model.images.preprocess import upright_photo
from model.images.sheet import ContactSheet, draw_maps
from model.methods import methods
from model.outputs import AttentionMap
from service.cli.answers import LocalAnswers, SeenMaps, handle_answers
from service.cli.image_files import (
    add_output_flag,
    find_images,
    print_notes,
    require_output_file,
    writing,
)
from service.cli.setting_flags import add_setting_flags, settings_from
from service.settings import Settings

_SUFFIX: Final = ".heat.png"
"""End of a map's name, so that it does not overwrite its picture in the same folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve attention`."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|FOLDER")
    add_output_flag(parser, "OUT", "a folder; for one picture also a file, OUT.png", required=False)
    parser.add_argument(
        "--sheet", type=Path, metavar="FILE", help="one PNG with all maps, small and labelled"
    )
    names = list(methods())
    parser.add_argument("--method", help=f"one of {', '.join(names)} (default: {names[0]})")
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        default=[],
        metavar="CLASS",
        help="label or index to explain; with several, separated by commas, the maps are drawn "
        "side by side (default: the best class)",
    )
    parser.add_argument(
        "--side-by-side", action="store_true", help="draw the picture next to its map"
    )
    add_setting_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the maps of all files, and return 1 if any file fails."""
    files = _without_maps(find_images(arguments.paths), arguments.paths)
    targets = _targets(arguments, files)
    settings = settings_from(arguments)
    source = LocalAnswers(arguments)
    sheet: ContactSheet | None = None

    def write(file: Path, answer: SeenMaps) -> None:
        nonlocal sheet
        labels = source.info.labels
        description = "; ".join(_described(attention_map, labels) for attention_map in answer.maps)
        drawing = _draw(arguments, settings, labels, file, answer)
        target = targets.get(file)
        if target is not None:
            _save(drawing, target)
        if arguments.sheet is not None:
            sheet = sheet or ContactSheet(len(files), drawing.size)
            sheet.add(drawing, file.name, description)
        tqdm.write(f"{target or file}: {description}", file=sys.stdout)

    code = handle_answers(
        source.maps(files, arguments.classes, arguments.method), len(files), write, "map"
    )
    if sheet is not None:
        _save(sheet.image, arguments.sheet)
    return code


def _without_maps(files: Sequence[Path], named: Sequence[Path]) -> list[Path]:
    """Return the files without the maps that an earlier run wrote into a folder of pictures.

    Raises:
        InputError: all files are such maps.
    """
    pictures = [file for file in files if file in named or not file.name.endswith(_SUFFIX)]
    note = (
        f"{len(files) - len(pictures)} of {len(files)} files are maps of an earlier run "
        f"(*{_SUFFIX}) and are left out; to draw one, name its file"
    )
    if not pictures:
        raise InputError("path", note)
    if len(pictures) < len(files):
        print_notes([note])
    return pictures


def _targets(arguments: argparse.Namespace, files: Sequence[Path]) -> dict[Path, Path]:
    """Return the file for each picture's map: one in the output folder, or the output file."""
    folder = arguments.output
    if folder is None and arguments.sheet is None:
        raise InputError("output", "say where to write: -o OUT, --sheet FILE.png or both")
    if arguments.sheet is not None:
        require_output_file(arguments.sheet, ".png")
    if folder is None:
        return {}
    if arguments.sheet is not None and folder.resolve() == arguments.sheet.resolve():
        raise InputError("output", f"{folder}: -o and --sheet name one file: name two")
    if files == arguments.paths and len(files) == 1 and folder.suffix and not folder.is_dir():
        require_output_file(folder, ".png")
        return {files[0]: folder}
    if folder.suffix.lower() in PICTURE_SUFFIXES and not folder.is_dir():
        raise InputError(
            "output",
            f"{folder}: ends like the name of a picture: name a folder for the maps, or write one "
            f"picture of all of them with --sheet {folder.with_suffix('.png')}",
        )
    if folder.is_file():
        raise InputError("output", f"{folder}: is a file: name a folder for the maps")
    with writing(folder):
        folder.mkdir(exist_ok=True)
    pictures: dict[Path, Path] = {}
    for picture in files:
        # Pictures of the same name in several folders get -2, -3, ...
        numbers = ("" if number == 1 else f"-{number}" for number in itertools.count(1))
        names = (folder / f"{picture.stem}{number}{_SUFFIX}" for number in numbers)
        pictures[next(name for name in names if name not in pictures)] = picture
    return {picture: name for name, picture in pictures.items()}


def _draw(
    arguments: argparse.Namespace,
    settings: Settings,
    labels: Sequence[str],
    file: Path,
    answer: SeenMaps,
) -> Image.Image:
    """Return the maps of a file side by side; raises ImageError when its photo cannot be read."""
    picture = answer.seen.pixels
    region = None
    if default_view(picture.shape[:2]) == "photo":
        bounds: dict[str, Any] = {
            "max_pixels": settings.max_image_pixels,
            "scaled_decode": settings.scaled_decode,
        }
        if file.is_fifo():
            raise ImageError(
                "a pipe is read only once, but the map is drawn on the photo, which is read again: "
                "write the picture to a file, and name it"
            )
        picture, region = upright_photo(file.read_bytes(), answer.seen.region, **bounds)
    name = file.name if arguments.side_by_side else None
    return draw_maps(answer.maps, labels, picture=picture, region=region, name=name)


def _described(attention_map: AttentionMap, labels: Sequence[str]) -> str:
    """Return a map's method, preceded by its class, score and evidence if it has a class."""
    request = attention_map.request
    if request.class_index is None:
        return request.method
    label = labels[request.class_index]
    score = f"{attention_map.score:.1%}"
    return f"{label} ({score}), {request.method}, evidence {attention_map.evidence:.2f}"


def _save(drawing: Image.Image, target: Path) -> None:
    with writing(target):
        drawing.save(target, "PNG", compress_level=4)
