"""`vitserve inspect CHECKPOINT`: what was understood of a checkpoint and what it learned, without serving it."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.errors import FigureError, ImageError, InputError
from model.images.preprocess import preprocess
from model.insight import figures
from service.cli.classify import find_pictures
from service.cli.model_flags import CHECKPOINT_FLAGS, add_model_flags, settings_from
from service.engine.loading import checkpoint_from
from service.settings import Settings

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.network.vit import VisionTransformer

FILTERS: Final = "filters.png"
POSITIONS: Final = "position_similarity.png"
DISTANCE: Final = "attention_distance.png"
DISTANCE_NUMBERS: Final = "attention_distance.csv"
_BATCH: Final = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve inspect`."""
    parser.add_argument("checkpoint", nargs="?", default="bundled", help="as `vitserve serve --checkpoint` takes it")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw what the network learned, as PNG files here")
    parser.add_argument(
        "--images",
        type=Path,
        metavar="FOLDER",
        help="pictures, in subfolders too, on which --figures measures how far attention reaches",
    )
    add_model_flags(parser, CHECKPOINT_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Read the checkpoint as the service does, weights and all, print it, and draw it where asked to.

    Returns:
        0, or 1 if a picture was left out.

    Raises:
        CheckpointError: it cannot be read exactly.
        FigureError: matplotlib is missing, or a figure cannot be written.
        InputError: no folder of pictures at `--images`, or none of them can be read.
    """
    if arguments.images is not None and arguments.figures is None:
        raise InputError("images", "--images needs --figures DIR, where the figures go")
    files = [] if arguments.images is None else find_pictures([arguments.images])
    if arguments.figures is not None:
        figures.require()
        try:
            arguments.figures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FigureError(f"{arguments.figures}: cannot be made: {error.strerror}") from error
    from model.insight.summary import summarise  # noqa: PLC0415  torch takes seconds to import

    settings = settings_from(arguments)
    checkpoint = checkpoint_from(settings)
    model = checkpoint.build()  # names, shapes and values of the weights are checked here
    rows = summarise(checkpoint)
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")  # noqa: T201
    if arguments.figures is None:
        return 0
    _draw_weights(model, arguments.figures)
    if not files:
        print(f"{DISTANCE}: not drawn, it needs pictures: --images FOLDER")  # noqa: T201
        return 0
    return _draw_attention(checkpoint, model, files, settings, arguments.figures)


def _draw_weights(model: VisionTransformer, out: Path) -> None:
    """The figures that need no pictures; those that this model cannot have are named."""
    from model.insight import analysis  # noqa: PLC0415  torch takes seconds to import

    try:
        found = analysis.patch_filters(model)
        figures.patch_filters(found.components.numpy(), found.explained.numpy(), out / FILTERS)
        print(f"{out / FILTERS}: {len(found.components)} components, {found.explained.sum():.1%} of the variance")  # noqa: T201
    except InputError as error:
        print(f"{FILTERS}: not drawn, {error}")  # noqa: T201
    try:
        figures.position_similarity(analysis.position_similarity(model).numpy(), out / POSITIONS)
        print(f"{out / POSITIONS}: {model.config.grid[0]}x{model.config.grid[1]} positions")  # noqa: T201
    except InputError as error:
        print(f"{POSITIONS}: not drawn, {error}")  # noqa: T201


def _draw_attention(
    checkpoint: Checkpoint, model: VisionTransformer, files: list[Path], settings: Settings, out: Path
) -> int:
    """Mean attention distance as figure and as CSV; pictures that cannot be read are named and left out."""
    import torch  # noqa: PLC0415

    from model.insight import analysis  # noqa: PLC0415

    mean = torch.tensor(checkpoint.preprocess.mean).reshape(-1, 1, 1)
    std = torch.tensor(checkpoint.preprocess.std).reshape(-1, 1, 1)
    bad: list[Path] = []

    def pictures() -> Iterator[NDArray[np.uint8]]:
        for file in tqdm(files, desc="attention", unit="img", disable=None):
            try:
                yield preprocess(
                    file.read_bytes(),
                    checkpoint.preprocess,
                    max_pixels=settings.max_image_pixels,
                    scaled_decode=settings.scaled_decode,
                )
            except (ImageError, OSError) as error:
                bad.append(file)
                print(f"vitserve: {file}: left out: {error}", file=sys.stderr)  # noqa: T201

    def batches() -> Iterator[torch.Tensor]:
        waiting: list[NDArray[np.uint8]] = []
        for picture in pictures():
            waiting.append(picture)
            if len(waiting) == _BATCH:
                yield normalised(waiting)
                waiting = []
        if waiting:
            yield normalised(waiting)

    def normalised(waiting: list[NDArray[np.uint8]]) -> torch.Tensor:
        return (torch.from_numpy(np.stack(waiting)).permute(0, 3, 1, 2).float() / 255 - mean) / std

    distance = analysis.mean_attention_distance(model, batches()).numpy()
    try:
        with (out / DISTANCE_NUMBERS).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["layer", "head", "distance_px"])
            writer.writerows([layer, head, f"{value:.3f}"] for (layer, head), value in np.ndenumerate(distance))
    except OSError as error:
        raise FigureError(f"{out / DISTANCE_NUMBERS}: cannot be written: {error.strerror}") from error
    even = analysis.even_attention_distance(checkpoint.config)
    figures.attention_distance(distance, out / DISTANCE, even=even)
    means = distance.mean(axis=1)
    print(  # noqa: T201
        f"{out / DISTANCE}: {len(files) - len(bad)} pictures, mean over heads {means[0]:.1f} px in the first layer, "
        f"{means[-1]:.1f} px in the last, {even:.1f} px if spread evenly; numbers in {DISTANCE_NUMBERS}"
    )
    return int(bool(bad))
