"""`vitserve bench`: load a running server and print rates, latencies and batch sizes."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from model.errors import InputError
from service.cli.image_files import EXAMPLE_IMAGE, find_images
from service.cli.server_flags import add_api_key_flag, api_key_for, local_url, request_errors
from vitserve.client import AsyncClient
from vitserve.documents import Classification, ModelDescription


@dataclass(slots=True)
class LoadMeasurement:
    """The measurements of one server by its clients.

    Attributes:
        latencies: seconds of each request answered with 200.
        batch_sizes: the batch size that each of these answers names.
        refused: count of the other answers, by status.
        seconds: from the first request to the last answer.
    """

    latencies: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve bench`."""
    parser.add_argument("pictures", nargs="*", type=Path, metavar="FILE|FOLDER", help="default: the example picture")
    parser.add_argument("--url", default=local_url(), help="of the server (default: %(default)s) [VIT_PORT]")
    add_api_key_flag(parser)
    parser.add_argument(
        "--concurrency", type=int, default=32, help="clients, each with one request under way (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="to measure, after one of warm-up (default: %(default)s)"
    )
    parser.add_argument("--attention", action="store_true", help="ask for the attention map, too")


def run(arguments: argparse.Namespace) -> int:
    """Load the server and print its clients' measurements."""
    if arguments.concurrency < 1 or arguments.seconds <= 0:
        raise InputError("concurrency", "--concurrency and --seconds must be above zero")
    images = [file.read_bytes() for file in find_images(arguments.pictures)] or [EXAMPLE_IMAGE.read_bytes()]
    with request_errors(arguments.url):
        model, measurement = asyncio.run(_measure(arguments, images))
    _print(arguments, model, len(images), measurement)
    return int(not measurement.latencies)


async def _measure(arguments: argparse.Namespace, images: list[bytes]) -> tuple[ModelDescription, LoadMeasurement]:
    """Load the server for a second that does not count, and then for as long as the arguments say."""
    key = api_key_for(arguments.url, arguments.api_key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=arguments.concurrency)
    async with AsyncClient(arguments.url, api_key=key, timeout=60) as client:
        model = await client.model()
    async with httpx.AsyncClient(base_url=arguments.url, headers=headers, limits=limits, timeout=60) as http:
        turn = itertools.cycle(images)
        for seconds in (1.0, arguments.seconds):
            measurement = LoadMeasurement()
            started = time.perf_counter()
            clients = (
                _client(http, turn, arguments.attention, started + seconds, measurement)
                for _ in range(arguments.concurrency)
            )
            await asyncio.gather(*clients)
            measurement.seconds = time.perf_counter() - started
    return model, measurement


async def _client(
    http: httpx.AsyncClient, images: Iterator[bytes], attention: bool, until: float, measurement: LoadMeasurement
) -> None:
    """Send one request after another until `until`, in seconds of `time.perf_counter`."""
    query = {"attention": "true"} if attention else {}
    while (started := time.perf_counter()) < until:
        response = await http.post("/classify", params=query, content=next(images), headers={"Content-Type": "image/*"})
        if response.status_code == 200:
            measurement.latencies.append(time.perf_counter() - started)
            measurement.batch_sizes.append(Classification.model_validate_json(response.content).batch_size)
        else:
            measurement.refused[response.status_code] += 1


def _print(arguments: argparse.Namespace, model: ModelDescription, images: int, measurement: LoadMeasurement) -> None:
    latencies = measurement.latencies
    rows = {
        "server": arguments.url,
        "model": f"{model.name}, {model.device} in {model.dtype}, {model.backend}, compile: {model.compiled}",
        "load": f"{arguments.concurrency} clients, {images} picture(s), attention {str(arguments.attention).lower()}",
        "client": f"httpx {httpx.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores shared",
        "answered": f"{len(latencies)} in {measurement.seconds:.1f} s",
    }
    if latencies:
        p50, p99 = np.percentile(latencies, (50, 99))
        # Each batch answers as many requests as it is large, so its size counts once for each of them.
        batches = sum(1 / size for size in measurement.batch_sizes)
        rows |= {
            "requests/s": f"{len(latencies) / measurement.seconds:.1f}",
            "p50": f"{1000 * p50:.1f} ms",
            "p99": f"{1000 * p99:.1f} ms",
            "mean batch": f"{len(latencies) / batches:.1f}",
        }
    if measurement.refused:
        rows["refused"] = ", ".join(f"{count} x {status}" for status, count in sorted(measurement.refused.items()))
    for name, value in rows.items():
        print(f"{name:12} {value}")  # noqa: T201
