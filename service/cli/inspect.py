"""`vitserve inspect CHECKPOINT`: a checkpoint's summary and analyses, without serving it."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.config import PreprocessConfig
from model.errors import FigureError, ImageError, InputError
from model.insight import figures
from service.cli.image_files import find_images, read_input, report_left_out, writing
from service.cli.setting_flags import CHECKPOINT_FLAGS, add_setting_flags, settings_from
from service.engine.loading import checkpoint_from
from service.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

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
    add_setting_flags(parser, CHECKPOINT_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Read, print and, where asked to, draw the checkpoint; return 1 if an image was left out."""
    out: Path | None = arguments.figures
    if arguments.images is not None and out is None:
        raise InputError("images", "--images needs --figures DIR, where the figures go")
    files = [] if arguments.images is None else find_images([arguments.images])
    if out is not None:
        figures.require()
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FigureError(f"{out}: cannot be made: {error.strerror}") from error
    settings = settings_from(arguments)
    checkpoint = checkpoint_from(settings)
    checkpoint.network()  # names, shapes and values of the weights are checked here
    _print_summary(checkpoint)
    if out is None:
        return 0
    model = checkpoint.build()
    for name, draw in ((FILTERS, _draw_filters), (POSITIONS, _draw_positions)):
        try:
            print(f"{out / name}: {draw(model, out / name)}")  # noqa: T201
        except InputError as error:
            print(f"{name}: not drawn, {error}")  # noqa: T201
    if not files:
        print(f"{DISTANCE}: not drawn, it needs pictures: --images FOLDER")  # noqa: T201
        return 0
    unreadable: list[Path] = []
    images = _readable(files, checkpoint.preprocess, settings, on_unreadable=unreadable.append)
    text = _draw_attention(checkpoint, model, images, out)
    print(f"{out / DISTANCE}: {len(files) - len(unreadable)} pictures, {text}")  # noqa: T201
    return int(bool(unreadable))


def _print_summary(checkpoint: Checkpoint) -> None:
    from model.insight.summary import summarise  # noqa: PLC0415  torch takes seconds to import

    rows = summarise(checkpoint)
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")  # noqa: T201


def _draw_filters(model: VisionTransformer, path: Path) -> str:
    """Draw the principal components of the patch filters; raises `InputError` when this model has none."""
    from model.insight.analyses import patch_filters  # noqa: PLC0415  torch takes seconds to import

    filters = patch_filters(model)
    figures.patch_filters(filters.components.numpy(), filters.explained.numpy(), path)
    return f"{len(filters.components)} components, {filters.explained.sum():.1%} of the variance"


def _draw_positions(model: VisionTransformer, path: Path) -> str:
    """Draw how alike the position embeddings are; raises `InputError` when this model has none."""
    from model.insight.analyses import position_similarity  # noqa: PLC0415  torch takes seconds to import

    figures.position_similarity(position_similarity(model).numpy(), path)
    return f"{model.config.grid[0]}x{model.config.grid[1]} positions"


def _draw_attention(
    checkpoint: Checkpoint, model: VisionTransformer, images: Iterator[NDArray[np.uint8]], out: Path
) -> str:
    """Draw the mean attention distance, write its numbers, and return a line about them."""
    from model.insight.analyses import (  # noqa: PLC0415  torch takes seconds to import
        even_attention_distance,
        mean_attention_distance,
    )

    distance = mean_attention_distance(model, _normalised_batches(images, checkpoint.preprocess)).numpy()
    path = out / DISTANCE_NUMBERS
    with writing(path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["layer", "head", "distance_px"])
        writer.writerows([layer, head, f"{value:.3f}"] for (layer, head), value in np.ndenumerate(distance))
    even = even_attention_distance(checkpoint.vit)
    figures.attention_distance(distance, out / DISTANCE, even=even)
    means = distance.mean(axis=1)
    return (
        f"mean over heads {means[0]:.1f} px in the first layer, {means[-1]:.1f} px in the last, "
        f"{even:.1f} px if spread evenly; numbers in {DISTANCE_NUMBERS}"
    )


def _readable(
    files: list[Path], config: PreprocessConfig, settings: Settings, on_unreadable: Callable[[Path], None]
) -> Iterator[NDArray[np.uint8]]:
    """Yield the pixels of each file, uint8 [H, W, C]; a file that cannot be read is named on stderr and left out."""
    for file in tqdm(files, desc="attention", unit="img", disable=None):
        try:
            yield read_input(file.read_bytes(), config, settings).pixels
        except (ImageError, OSError) as error:
            on_unreadable(file)
            report_left_out(file, error)


def _normalised_batches(images: Iterator[NDArray[np.uint8]], config: PreprocessConfig) -> Iterator[Tensor]:
    """Yield float32 [B, C, H, W] of at most `_BATCH` images."""
    import torch  # noqa: PLC0415  torch takes seconds to import

    from model.runtime.torch_backend import Normalise  # noqa: PLC0415

    normalise = Normalise(config)
    while batch := list(islice(images, _BATCH)):
        yield normalise(torch.from_numpy(np.stack(batch)))
