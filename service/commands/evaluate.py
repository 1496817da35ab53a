"""`vitserve evaluate`: accuracy on CIFAR-10's test images, in-process or through a running server."""

from __future__ import annotations

import argparse
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from model.errors import DatasetError, InputError
from service.client import Client, ClientError
from service.commands.model_flags import add_model_flags, predictor_from

if TYPE_CHECKING:
    from model.training.evaluate import Evaluation


def add_parser(commands: Any) -> None:
    """Flags of `vitserve evaluate`."""
    parser = commands.add_parser("evaluate", help="measure a checkpoint's accuracy on CIFAR-10's test images")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="CIFAR-10's binary files")
    parser.add_argument("--url", help="ask this server, with each image as a PNG, instead of loading the model here")
    parser.add_argument("--api-key", help="key for --url [VIT_API_KEY]", default=os.environ.get("VIT_API_KEY"))
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="requests under way with --url")
    add_model_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        DatasetError: the data cannot be read, or are not what the model was made for.
        InputError: no server at the URL, or one that fails.
    """
    if arguments.url:
        what, found = f"the server at {arguments.url}", _evaluate_server(arguments)
    else:
        from model.training.evaluate import evaluate_cifar10  # noqa: PLC0415  torch takes seconds to import

        predictor, info, _ = predictor_from(arguments)
        what = f"{info.name} on {info.device} in {info.dtype}"
        found = evaluate_cifar10(predictor, arguments.data, progress=True)
    _print(what, found)
    return 0


def _evaluate_server(arguments: argparse.Namespace) -> Evaluation:
    from model.training import cifar10  # noqa: PLC0415  torch takes seconds to import
    from model.training.evaluate import measure  # noqa: PLC0415

    names, images = cifar10.read_labels(arguments.data), cifar10.read_test(arguments.data)
    try:
        with Client(arguments.url, api_key=arguments.api_key) as client:
            if tuple(client.labels()) != names:
                raise DatasetError(f"{arguments.data}: the server's classes are not {', '.join(names)}")

            def ask(pixels: NDArray[np.uint8]) -> list[float]:
                predictions = client.classify(_png(pixels), top_k=len(names)).predictions
                by_index = {found.index: found.score for found in predictions}
                return [by_index[index] for index in range(len(names))]

            with ThreadPoolExecutor(arguments.concurrency) as pool:
                answers = list(tqdm(pool.map(ask, images.pixels), total=len(images), desc="evaluate", unit="img"))
    except (httpx.TransportError, ClientError) as error:
        raise InputError("url", f"{arguments.url}: {error}") from None
    return measure(np.array(answers, np.float32), images.labels, names)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """uint8 [3, H, W] -> the bytes of a PNG, which loses nothing."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(buffer, "png")
    return buffer.getvalue()


def _print(what: str, found: Evaluation) -> None:
    print(f"{what}: {found.accuracy:.2%} of {found.count} test images right")  # noqa: T201
    print(f"loss {found.loss:.4f} nats, expected calibration error {found.calibration_error:.2%}")  # noqa: T201
    for label, accuracy in found.per_class.items():
        print(f"  {label:12} {accuracy:.1%}")  # noqa: T201
