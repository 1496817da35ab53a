"""`vitserve attention FILE|FOLDER... -o OUT`: maps of where the model looked, in-process or through a server."""

from __future__ import annotations

import argparse
import io
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from model.errors import InputError
from model.images.heatmap import COLORMAPS, MAX_SIZE, default_view
from model.images.preprocess import ModelInput, upright_photo
from model.images.sheet import ContactSheet, draw_maps, in_a_row
from model.outputs import FUSIONS, METHODS, AttentionMap, Outputs, RequestedOutputs, evidence_in_words, parse_maps
from service.cli.image_files import find_images, handle_answers, predict_files, writing
from service.cli.server_flags import add_server_flags, client_of, stream_answers
from service.cli.setting_flags import add_setting_flags, predictor_from

_OPTIONS = ("method", "layer", "head", "fusion", "discard")
"""Arguments that say which map it is, and"""

_LOOK = ("overlay", "view", "smooth", "colorbar", "caption", "alpha", "colormap", "size")
"""how it is drawn, under the names that the service has for them."""

_MOST: Final = 8
"""Images computed together at most: a bar that moves, and little memory."""


@dataclass(frozen=True, slots=True)
class FileMaps:
    """The maps of one file.

    Attributes:
        label, score: of the best class; the score is None where the model has no classes.
        method: of the maps, with its parameters and the classes that are named.
        facts: what more is known of them.
        drawing: the maps beside each other, behind the picture if that is asked for.
        small: the same without captions, for a sheet.
        values: float32 [rows, columns], or [maps, rows, columns] for several classes.
    """

    label: str
    score: float | None
    method: str
    facts: str
    drawing: Image.Image | None
    small: Image.Image | None
    values: NDArray[np.float32] | None


class _Wanted(NamedTuple):
    """What of `FileMaps` is asked for."""

    drawing: bool
    small: bool
    values: bool


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
    parser.add_argument(
        "--view",
        choices=("input", "photo"),
        help="what the model saw, or the whole photo (default for inputs below 128 pixels)",
    )
    parser.add_argument("--side-by-side", action="store_true", help="the picture beside its map")
    parser.add_argument("--no-overlay", dest="overlay", action="store_const", const=False, help="the map alone")
    parser.add_argument("--no-smooth", dest="smooth", action="store_const", const=False, help="patches as squares")
    parser.add_argument("--no-caption", dest="caption", action="store_const", const=False, help="the drawing alone")
    parser.add_argument("--colorbar", action="store_const", const=True, help="a colour bar with its scale")
    parser.add_argument("--alpha", type=float, help="weight of the map over the picture, 0 ... 1")
    parser.add_argument("--colormap", choices=COLORMAPS)
    parser.add_argument("--size", type=int, help=f"longer side in pixels, at most {MAX_SIZE}")
    add_server_flags(parser)
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
    name_of = _folder_names(output, ".npy" if numbers else ".png") if to_a_folder else lambda _: output
    wanted = _Wanted(drawing=output is not None and not numbers, small=arguments.sheet is not None, values=numbers)
    answers = (_through_server if arguments.url else _in_process)(files, arguments, wanted)
    sheet: ContactSheet | None = None

    def write(file: Path, answer: FileMaps | str) -> None:
        nonlocal sheet
        if isinstance(answer, str):
            tqdm.write(f"vitserve: {file}: {answer}", file=sys.stderr)
            return
        target = name_of(file)
        if target is not None:
            _write(answer, target, numbers)
        best = "no classes" if answer.score is None else f"{answer.label} ({answer.score:.1%})"
        if answer.small is not None:
            sheet = sheet or ContactSheet(len(files), answer.small.size)
            mark = "; best class" if arguments.classes else ":"
            score = "" if answer.score is None else f"{mark} {answer.score:.0%} {answer.label}"
            sheet.add(answer.small, file.name, f"{answer.method}{score}")
        facts = f", {answer.facts}" if answer.facts else ""
        tqdm.write(f"{target or file}: {best}, {answer.method}{facts}", file=sys.stdout)

    code = handle_answers(answers, len(files), write, "map")
    if sheet is not None:
        _save(sheet.image, arguments.sheet)
    return code


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the arguments that are given; the others are the service's defaults."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _through_server(
    files: Sequence[Path], arguments: argparse.Namespace, wanted: _Wanted
) -> Iterator[tuple[Path, FileMaps | str]]:
    options, look = _given(arguments, _OPTIONS), _given(arguments, _LOOK)
    if arguments.classes:
        options["class_"] = arguments.classes

    def drawing(file: Path, **look: Any) -> Image.Image:
        panels = []
        if arguments.side_by_side:
            # Without the colour bar, as no map is drawn.
            plain = {name: value for name, value in look.items() if name in ("size", "view", "caption")}
            panels.append(client.heat_map(file, alpha=0, **plain))
        panels.append(client.heat_map(file, **options, **look))
        return in_a_row(map(_opened, panels), len(panels))

    def ask(file: Path) -> FileMaps:
        best = client.classify(file, top_k=1).predictions[0] if has_classes else None
        return FileMaps(
            "" if best is None else best.label,
            None if best is None else best.score,
            method,
            "",
            drawing(file, **look) if wanted.drawing else None,
            drawing(file, **(look | {"caption": False})) if wanted.small else None,
            client.attention_array(file, **options) if wanted.values else None,
        )

    with client_of(arguments) as client:
        # It also gives one error for all files where there is no service.
        model = client.model()
        has_classes, method = bool(model.classes), _method_named(arguments, model.attention_methods[0])
        yield from stream_answers(files, client, ask, concurrency=4)


def _method_named(arguments: argparse.Namespace, default: str) -> str:
    """Return the method that the arguments mean, with their parameters and classes."""
    options = _given(arguments, _OPTIONS)
    implied = (
        "cls" if {"layer", "head"} & set(options) else "rollout" if {"fusion", "discard"} & set(options) else default
    )
    name = options.pop("method", implied)
    of_classes = f" of {' and '.join(arguments.classes)}" if arguments.classes else ""
    return ", ".join([f"{name}{of_classes}", *(f"{option} {value}" for option, value in options.items())])


def _in_process(
    files: Sequence[Path], arguments: argparse.Namespace, wanted: _Wanted
) -> Iterator[tuple[Path, FileMaps | str]]:
    predictor, info, settings = predictor_from(arguments)
    classes, look = ",".join(arguments.classes) or None, _given(arguments, _LOOK)
    maps = parse_maps(info.config, info.labels, classes=classes, **_given(arguments, _OPTIONS))
    overlay, view, captions = look.pop("overlay", True), look.pop("view", None), look.pop("caption", True)
    if view == "photo" and not overlay:
        raise InputError("view", "--view photo does not apply with --no-overlay")
    whole_photo = overlay and (view or default_view(info.config.image_size)) == "photo"

    def answer(file: Path, seen: ModelInput, outputs: list[Outputs]) -> FileMaps:
        maps = [each.map for each in outputs if each.map is not None]
        picture, region = seen.pixels, None
        if whole_photo and (wanted.drawing or wanted.small):
            picture, region = upright_photo(
                file.read_bytes(),
                seen.region,
                arguments.size,
                max_pixels=settings.max_image_pixels,
                scaled_decode=settings.scaled_decode,
            )
        name = file.name if arguments.side_by_side else None
        options = {"picture": picture, "region": region, "overlay": overlay, "name": name} | look
        values = np.stack([each.values for each in maps])
        label, score = "", None
        if info.labels:
            label, score = info.labels[int(outputs[0].indices[0])], float(outputs[0].scores[0])
        return FileMaps(
            label,
            score,
            *_facts(maps, info.labels if arguments.classes else None),
            draw_maps(maps, info.labels if captions else None, **options) if wanted.drawing else None,
            draw_maps(maps, None, **options) if wanted.small else None,
            values if len(values) > 1 else values[0],
        )

    requests = [RequestedOutputs(1, request) for request in maps]
    return predict_files(files, requests, answer, predictor, info, settings, most=_MOST)


def _facts(maps: Sequence[AttentionMap], labels: Sequence[str] | None) -> tuple[str, str]:
    """Return the method of the maps with its parameters, and classes if there are labels; and what more is known."""
    request, what = maps[0].request, str(maps[0].request.method)
    if request.method == "cls":
        what = f"cls, layer {request.layer}, head {request.head}"
    elif request.method == "rollout":
        what = f"rollout, fusion {request.fusion}, discard {request.discard:g}"
    if labels is not None:
        classes = (each.request.class_index for each in maps)
        what += f" of {' and '.join(labels[index] for index in classes if index is not None)}"
    evidence = " and ".join(
        f"{evidence_in_words(each.evidence)} ({each.evidence:.2f})" for each in maps if each.evidence is not None
    )
    rows, columns = maps[0].values.shape
    facts = f"{rows}x{columns} patches, kept mass {maps[0].kept_mass:.2f}"
    return what, f"evidence {evidence}, {facts}" if evidence else facts


def _opened(png: bytes) -> Image.Image:
    with Image.open(io.BytesIO(png)) as picture:
        return picture.convert("RGB")


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


def _write(answer: FileMaps, target: Path, numbers: bool) -> None:
    if not numbers:
        assert answer.drawing is not None, "a drawing was asked for"
        _save(answer.drawing, target)
        return
    assert answer.values is not None, "the numbers were asked for"
    with writing(target), target.open("wb") as file:
        np.save(file, answer.values, allow_pickle=False)


def _save(drawing: Image.Image, target: Path) -> None:
    with writing(target):
        drawing.save(target, "PNG", compress_level=4)
