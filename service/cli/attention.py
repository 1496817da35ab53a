"""`vitserve attention FILE -o heat.png`: the heat map of one image, in-process."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from model.errors import InputError
from model.images.heatmap import COLORMAPS, MAX_SIZE, render_heatmap
from model.images.preprocess import preprocess
from model.prediction import MapRequest, parse_head, parse_layer
from service.cli.setting_flags import add_setting_flags, predictor_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve attention`."""
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="PNG, or .npy for the numbers")
    parser.add_argument("--layer", type=int, default=-1, help="negatives count from the end (default: the last)")
    parser.add_argument("--head", default="mean", help="mean, max, or a head's number (default: mean)")
    parser.add_argument("--no-overlay", dest="overlay", action="store_false", help="the map alone")
    parser.add_argument("--alpha", type=float, help="weight of the map over the picture, 0 ... 1")
    parser.add_argument("--colormap", choices=COLORMAPS)
    parser.add_argument("--size", type=int, help=f"longer side in pixels, at most {MAX_SIZE}")
    add_setting_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the map of one image, and print its best class and facts of the map."""
    if arguments.size is not None and not 1 <= arguments.size <= MAX_SIZE:
        raise InputError("size", f"--size {arguments.size}: expected 1 ... {MAX_SIZE}")
    if arguments.alpha is not None and not 0 <= arguments.alpha <= 1:
        raise InputError("alpha", f"--alpha {arguments.alpha}: expected 0 ... 1")
    try:
        data = arguments.file.read_bytes()
    except OSError as error:
        raise InputError("file", f"{arguments.file}: {error.strerror}") from None
    if arguments.output.is_dir() or not arguments.output.parent.is_dir():
        raise InputError("output", f"{arguments.output}: not a file in a folder that exists")
    predictor, info, settings = predictor_from(arguments)
    wanted = MapRequest(parse_layer(arguments.layer, info.config.depth), parse_head(arguments.head, info.config.heads))
    pixels = preprocess(data, info.preprocess, max_pixels=settings.max_image_pixels)
    found = predictor.predict(pixels[None], top_k=1, maps=[wanted])
    map_ = found.maps[0]
    assert map_ is not None, "a map was asked for"
    try:
        if arguments.output.suffix == ".npy":
            np.save(arguments.output, map_.values, allow_pickle=False)
        else:
            drawing = {name: vars(arguments)[name] for name in ("alpha", "colormap", "size")}
            given = {name: value for name, value in drawing.items() if value is not None}
            picture = pixels if arguments.overlay else None
            arguments.output.write_bytes(render_heatmap(map_.values, picture=picture, **given))
    except OSError as error:
        raise InputError("output", f"{arguments.output}: {error.strerror}") from None
    rows, columns = map_.values.shape
    label = info.labels[int(found.indices[0, 0])]
    print(  # noqa: T201
        f"{arguments.output}: {label} ({found.scores[0, 0]:.1%}), layer {map_.layer}, head {map_.head}, "
        f"{rows}x{columns} patches, kept mass {map_.kept_mass:.2f}"
    )
    return 0
