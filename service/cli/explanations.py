"""`vitserve evaluate --explanations`: how faithful maps are to the model, for any checkpoint and pictures."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from tqdm import tqdm

from model.errors import ImageError, InputError
from model.insight import figures
from model.outputs import require_classes
from service.cli.image_files import find_images, read_input, report_left_out, writing
from service.cli.setting_flags import settings_from
from service.engine.loading import checkpoint_from
from service.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from model.checkpoint import Checkpoint
    from model.evaluation.explanations import Estimate, ExplanationResults, MethodResult
    from model.evaluation.faithfulness import Maps

Picture = tuple[str, Callable[[], bytes]]
"""What a message calls it, and the function that returns its file."""

_STEPS: Final = 28
_OWN_FLAGS: Final = ("steps", "limit", "seed", "csv", "figure")
_OTHER_FLAGS: Final = ("url", "unknown", "robustness", "card")
_COLUMNS: Final = (
    *("picture", "method", "class", "label", "deletion", "insertion", "mosaic", "quarters", "absent", "highest"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that measure maps."""
    group = parser.add_argument_group("faithfulness of maps")
    group.add_argument(
        "--explanations",
        nargs="*",
        metavar="METHOD",
        help="measure maps of each picture's best class, by these methods (all if none is named) and at random: "
        "deletion, insertion, mosaic share, peaks of absent classes. Labels are not needed",
    )
    group.add_argument(
        "--steps", type=_positive, metavar="N", help=f"steps of deletion and insertion. Default: {_STEPS}"
    )
    group.add_argument("--limit", type=_positive, metavar="N", help="take N of the pictures, evenly spaced")
    group.add_argument(
        "--seed", type=int, metavar="N", help="of the baseline, the mosaics and the intervals. Default: 0"
    )
    group.add_argument("--csv", type=Path, metavar="FILE", help="write the numbers of each picture and method")
    group.add_argument("--figure", type=Path, metavar="FILE", help="draw the table as a PNG")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go together; raises InputError."""
    with_maps = arguments.explanations is not None
    for name in _OTHER_FLAGS if with_maps else _OWN_FLAGS:
        if getattr(arguments, name) not in (None, False):
            raise InputError(
                name, f"--{name} is not for --explanations" if with_maps else f"--{name} needs --explanations"
            )


def measure_maps(arguments: argparse.Namespace) -> int:
    """Measure the maps, print the table and write the files; return 1 if a picture was left out."""
    for path in (arguments.csv, arguments.figure):
        if path is not None and not path.parent.is_dir():
            raise InputError("path", f"{path.parent}: no such folder")
    if arguments.figure is not None:
        figures.require()
    settings = settings_from(arguments)
    if settings.dtype not in ("auto", "float32"):
        raise InputError("dtype", "--explanations computes in float32")
    pictures = _pictures(arguments.data)
    count = min(arguments.limit or len(pictures), len(pictures))
    pictures = [pictures[number * len(pictures) // count] for number in range(count)]  # evenly spaced
    import torch  # noqa: PLC0415  torch takes seconds to import

    from model.evaluation import explanations  # noqa: PLC0415
    from model.runtime.device import choose_device  # noqa: PLC0415
    from model.runtime.torch_pass import Normalise  # noqa: PLC0415

    device = choose_device(settings.device)
    checkpoint = checkpoint_from(settings)
    require_classes(checkpoint.config)
    model = checkpoint.build().to(device)
    normalise = Normalise(checkpoint.preprocess).to(device)
    seed, steps = arguments.seed or 0, arguments.steps or _STEPS
    methods = _chosen(explanations.available_methods(model, seed=seed), arguments.explanations)
    readable = _readable(pictures, checkpoint, settings)

    def read(number: int) -> Tensor:
        _, read_file = readable[number]
        pixels = torch.from_numpy(read_input(read_file(), checkpoint.preprocess, settings).pixels).to(device)
        normalised: Tensor = normalise(pixels.unsqueeze(0))[0]
        return normalised

    score, evidence = explanations.model_score(model, checkpoint), explanations.model_evidence(model, checkpoint)
    results = explanations.measure_explanations(
        score, evidence, methods, read, len(readable), steps=steps, seed=seed, progress=True
    )
    by_method = results.methods(seed=seed)
    title = f"{settings.model_name or checkpoint.name} on {device} in float32: {len(readable)} pictures, {steps} steps"
    _print(title, results, by_method)
    if arguments.csv is not None:
        _write(arguments.csv, results, [name for name, _ in readable], checkpoint.labels)
    if arguments.figure is not None:
        figures.faithfulness(by_method, arguments.figure, title=title)
    return int(len(readable) < len(pictures))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number


def _pictures(data: Path) -> list[Picture]:
    """List the pictures below a folder, or CIFAR-10's test images where it has them."""
    from model.data.datasets import is_cifar10  # noqa: PLC0415
    from model.evaluation.evaluation_set import open_evaluation_set  # noqa: PLC0415

    if is_cifar10(data):
        images = open_evaluation_set(data)
        return [(images.name(number), partial(images.upload, number)) for number in range(len(images))]
    return [(str(file.relative_to(data)), file.read_bytes) for file in find_images([data])]


def _chosen(methods: dict[str, Maps], names: Sequence[str]) -> dict[str, Maps]:
    """Return the methods of these names (all if there are none) after the first one, the baseline."""
    for name in names:
        if name not in methods:
            raise InputError("explanations", f"method {name!r}: expected some of {', '.join(methods)}")
    return {
        name: maps for number, (name, maps) in enumerate(methods.items()) if not number or not names or name in names
    }


def _readable(pictures: list[Picture], checkpoint: Checkpoint, settings: Settings) -> list[Picture]:
    """Return the pictures that can be read; any other is named on stderr."""
    readable = []
    for picture in tqdm(pictures, desc="read", unit="img", disable=None):
        try:
            read_input(picture[1](), checkpoint.preprocess, settings)
        except (ImageError, OSError) as error:
            report_left_out(picture[0], error)
        else:
            readable.append(picture)
    return readable


def _print(title: str, results: ExplanationResults, methods: Sequence[MethodResult]) -> None:
    print(title)  # noqa: T201
    print(  # noqa: T201
        f"mean score of the classes: {results.whole:.3f} of the whole pictures, {results.mean_colour:.3f} of the mean "
        f"colour, {results.blurred:.3f} of the blurred pictures"
    )
    print(  # noqa: T201
        f"mosaic: {results.counted} of {results.quarters} quarters count; chance 0.25. "
        "In brackets: 95 % bootstrap intervals over the pictures"
    )
    for name in dict.fromkeys(each.method for each in results.pictures if each.absent):
        highest = max(peak for each in results.pictures if each.method == name for peak in each.absent)
        print(f"{name}: the highest peak of an absent class is {highest:.3f} of the best class's")  # noqa: T201
    width = max(6, *(len(result.method) for result in methods))
    columns = ("deletion (lower)", "insertion (higher)", "mosaic (higher)", "absent (lower)")
    print(f"{'method':{width}}  {'  '.join(f'{column:20}' for column in columns)}".rstrip())  # noqa: T201
    for result in methods:
        cells = "  ".join(f"{_cell(value):20}" for value in result[1:])
        print(f"{result.method:{width}}  {cells}".rstrip())  # noqa: T201


def _cell(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _write(path: Path, results: ExplanationResults, names: Sequence[str], labels: Sequence[str]) -> None:
    with writing(path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for each in results.pictures:
            share = f"{np.mean(each.shares):.6f}" if each.shares else ""
            areas = f"{each.deletion:.6f}", f"{each.insertion:.6f}"
            label = labels[each.class_index]
            peaks = (f"{np.mean(each.absent):.6f}", f"{max(each.absent):.6f}") if each.absent else ("", "")
            writer.writerow(
                [names[each.picture], each.method, each.class_index, label, *areas, share, len(each.shares), *peaks]
            )
