"""What `vitserve convert --dtype int8` adds to the native folder: how to compute in int8, and how often that agrees."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.config import PreprocessConfig
from model.errors import DeviceError, ImageError, InputError
from model.images.preprocess import preprocess, upright_photo
from model.images.region import Region
from model.images.views import square_view
from service.cli.image_files import find_images, report_left_out

if TYPE_CHECKING:
    from model.runtime.openvino.int8_record import Int8Record

CALIBRATED: Final = 300
"""Views to calibrate on."""

TESTED: Final = 500
"""Views on which the agreement is measured, at least; of no picture that was calibrated on."""

_MOST_TESTED: Final = 1000
_FEWEST: Final = 10
"""Pictures; with fewer, both halves would be of too few things."""

_SMALLEST: Final = 0.7
"""Share of a picture's shorter side that a view shows at least: with 0.5, bfloat16 itself disagrees on 1.2 %."""


def split_pictures(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the pictures below a folder to calibrate on, and those to measure the agreement on, always the same.

    Raises:
        InputError: there are too few.
    """
    files = find_images([folder])
    if len(files) < _FEWEST:
        raise InputError("data", f"{folder}: {len(files)} pictures, at least {_FEWEST} are needed")
    order = np.random.default_rng(0).permutation(len(files))
    shuffled = [files[place] for place in order]
    half = min(CALIBRATED, len(files) // 2)
    return shuffled[:half], shuffled[half : half + _MOST_TESTED]


def views_of(files: list[Path], count: int, config: PreprocessConfig) -> NDArray[np.uint8]:
    """Return at least `count` views of pictures, uint8 [N, H, W, C]: each whole, and squares of it as far as needed.

    Files that cannot be read are reported and left out.

    Raises:
        InputError: none can be read.
    """
    random = np.random.default_rng(1)
    views = []
    for path in files:
        try:
            data = path.read_bytes()
            views.append(preprocess(data, config))
            further = -(-count // len(files)) - 1
            if further:
                photo = Image.fromarray(upright_photo(data, Region(0, 0, 1, 1))[0])
                views += [
                    square_view(photo, random, config, smallest=_SMALLEST, mirrored=bool(random.integers(2)))
                    for _ in range(further)
                ]
        except (ImageError, OSError) as error:
            report_left_out(path, error)
    if not views:
        raise InputError("data", f"{files[0].parent}: none of the pictures can be read")
    return np.stack(views)


def add_int8(folder: Path, pictures: tuple[list[Path], list[Path]], least: float) -> Int8Record:
    """Quantise the checkpoint of a native folder, write how beside it, and return that.

    Args:
        folder: as `model.checkpoint.native.write` wrote it.
        pictures: of `split_pictures`.
        least: see `Quantiser.quantise`.

    Raises:
        DeviceError: the graph cannot be made here.
    """
    import torch  # noqa: PLC0415  it takes seconds to import

    from model.checkpoint import load_checkpoint  # noqa: PLC0415
    from model.runtime.batches import BatchRequest  # noqa: PLC0415
    from model.runtime.cpu import cpu_has_bfloat16  # noqa: PLC0415
    from model.runtime.openvino.int8_record import write_record  # noqa: PLC0415
    from model.runtime.openvino.quantization import Quantiser, compare, graph_logits, int8_graph  # noqa: PLC0415
    from model.runtime.openvino.tracing import trace  # noqa: PLC0415
    from model.runtime.torch_backend import TorchOptions  # noqa: PLC0415

    checkpoint = load_checkpoint(str(folder))
    if not checkpoint.config.num_classes:
        raise DeviceError("dtype 'int8': it is checked by the best class, and the model has none")
    calibrated, tested = (
        views_of(files, count, checkpoint.preprocess)
        for files, count in zip(pictures, (CALIBRATED, TESTED), strict=True)
    )
    threads = torch.get_num_threads()
    options = TorchOptions(checkpoint.network(), checkpoint, torch.device("cpu"), torch.float32, "off", (1,))
    graph = trace(options, BatchRequest())
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if cpu_has_bfloat16() else "float32"
    progress = partial(print, flush=True)
    products = Quantiser(graph.model, dtype, calibrated, threads=threads, progress=progress).quantise(least)
    reference = graph_logits(graph.model, "float32", tested, threads)
    found = compare(graph_logits(int8_graph(graph.model, products), dtype, tested, threads), reference)
    return write_record(checkpoint, products, found, pictures=len(tested), calibrated_on=len(calibrated), dtype=dtype)
