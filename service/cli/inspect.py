"""`vitserve inspect CHECKPOINT`: a checkpoint's summary and analyses, without serving it."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from tqdm import tqdm

from model.errors import InputError
from model.insight import figures
from service.cli.image_files import find_images, read_input, report_failure, writing
from service.cli.setting_flags import CHECKPOINT_FLAGS, add_setting_flags, settings_from
from service.engine.loading import checkpoint_from
from service.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from model.checkpoint import Checkpoint

DISTANCE: Final = "attention_distance.png"
DISTANCE_NUMBERS: Final = "attention_distance.csv"
_BATCH: Final = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve inspect`."""
    parser.add_argument("checkpoint", nargs="?", default="bundled", help="as `vitserve serve --checkpoint` takes it")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="pictures, in subfolders too, for --figures")
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="draw how far attention reaches on --images, as a PNG and a CSV here",
    )
    add_setting_flags(parser, CHECKPOINT_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Read, print and, where asked to, draw the checkpoint; return 1 if an image was left out."""
    out: Path | None = arguments.figures
    if (arguments.images is None) != (out is None):
        raise InputError("images", "--figures DIR and --images FOLDER need each other")
    files = [] if arguments.images is None else find_images([arguments.images])
    if out is not None:
        figures.require()
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
    settings = settings_from(arguments)
    checkpoint = checkpoint_from(settings)
    checkpoint.network()  # names, shapes and values of the weights are checked here
    from model.insight.summary import summarise  # noqa: PLC0415  torch takes seconds to import

    rows = summarise(checkpoint)
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")  # noqa: T201
    return 0 if out is None else _draw_distance(checkpoint, files, settings, out)


def _draw_distance(checkpoint: Checkpoint, files: list[Path], settings: Settings, out: Path) -> int:
    """Draw and print the mean attention distance, and write its numbers; return 1 if a file was left out."""
    from model.insight import analyses  # noqa: PLC0415  torch takes seconds to import

    unreadable: list[Path] = []
    batches = _batches(files, checkpoint, settings, unreadable)
    distance = analyses.mean_attention_distance(checkpoint.build(), batches).numpy()
    table = out / DISTANCE_NUMBERS
    with writing(table), table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["layer", "head", "distance_px"])
        writer.writerows([layer, head, f"{value:.3f}"] for (layer, head), value in np.ndenumerate(distance))
    even = analyses.even_attention_distance(checkpoint.vit)
    figures.attention_distance(distance, out / DISTANCE, even=even)
    means = distance.mean(axis=1)
    print(  # noqa: T201
        f"{out / DISTANCE}: {len(files) - len(unreadable)} pictures, mean over heads {means[0]:.1f} px in the first "
        f"layer, {means[-1]:.1f} px in the last, {even:.1f} px if spread evenly; numbers in {DISTANCE_NUMBERS}"
    )
    return int(bool(unreadable))


def _batches(files: list[Path], checkpoint: Checkpoint, settings: Settings, unreadable: list[Path]) -> Iterator[Tensor]:
    """Yield float32 [B, C, H, W] of at most `_BATCH` images; a file that cannot be read is named and left out."""
    import torch  # noqa: PLC0415  torch takes seconds to import

    from model.runtime.torch_pass import Normalise  # noqa: PLC0415

    normalise, remaining = Normalise(checkpoint.preprocess), iter(tqdm(files, unit="image", disable=None))
    while batch := list(islice(remaining, _BATCH)):
        pixels = []
        for file in batch:
            seen = read_input(file, checkpoint.preprocess, settings)
            if isinstance(seen, str):
                unreadable.append(file)
                report_failure(file, f"left out: {seen}")
            else:
                pixels.append(seen.pixels)
        if pixels:
            yield normalise(torch.from_numpy(np.stack(pixels)))
