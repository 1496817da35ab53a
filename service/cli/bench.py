"""`vitserve bench`: load a running server and print rates, latencies and batch sizes."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from model.errors import InputError
from service.cli.classify import find_pictures
from service.schemas import Classification, Model

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dog.jpg"


@dataclass(slots=True)
class Result:
    """What the clients saw.

    Attributes:
        latencies: seconds of each request answered 200.
        batch_sizes: of each of these answers, as the server told it.
        refused: answers by status, other than 200.
        seconds: from the first request to the last answer.
    """

    latencies: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    refused: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve bench`."""
    parser.add_argument("pictures", nargs="*", type=Path, metavar="FILE|FOLDER", help="default: the example picture")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("VIT_API_KEY"), help="[VIT_API_KEY]")
    parser.add_argument("--concurrency", type=int, default=32, help="clients, each with one request under way")
    parser.add_argument("--seconds", type=float, default=10, help="how long to measure, after one second of warm-up")
    parser.add_argument("--attention", action="store_true", help="ask for the attention map, too")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        InputError: no pictures, an option out of range, or no server at the URL.
    """
    if arguments.concurrency < 1 or arguments.seconds <= 0:
        raise InputError("concurrency", "--concurrency and --seconds must be above zero")
    paths = arguments.pictures or [_EXAMPLE]
    pictures = [path.read_bytes() for path in find_pictures(paths)]
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    try:
        model, result = asyncio.run(_measure(arguments, pictures, headers))
    except httpx.HTTPStatusError as error:
        raise InputError("url", f"{arguments.url}: {error.response.status_code}: {error.response.text}") from None
    except httpx.TransportError as error:
        raise InputError("url", f"{arguments.url}: {error}: is the server running?") from None
    _print(arguments, model, len(pictures), result)
    return int(not result.latencies)


async def _measure(
    arguments: argparse.Namespace, pictures: list[bytes], headers: dict[str, str]
) -> tuple[Model, Result]:
    limits = httpx.Limits(max_connections=arguments.concurrency)
    query = {"attention": "true"} if arguments.attention else {}
    result = Result()
    turn = itertools.cycle(pictures)
    async with httpx.AsyncClient(base_url=arguments.url, headers=headers, limits=limits, timeout=60) as http:
        model = Model.model_validate_json((await http.get("/model")).raise_for_status().content)

        async def client(until: float, counted: bool) -> None:
            while time.perf_counter() < until:
                started = time.perf_counter()
                response = await http.post(
                    "/classify", params=query, content=next(turn), headers={"Content-Type": "image/*"}
                )
                if not counted:
                    continue
                if response.status_code == 200:
                    result.latencies.append(time.perf_counter() - started)
                    result.batch_sizes.append(Classification.model_validate_json(response.content).batch_size)
                else:
                    result.refused[response.status_code] = result.refused.get(response.status_code, 0) + 1

        async def clients(seconds: float, counted: bool) -> None:
            until = time.perf_counter() + seconds
            await asyncio.gather(*(client(until, counted) for _ in range(arguments.concurrency)))

        await clients(1.0, counted=False)
        started = time.perf_counter()
        await clients(arguments.seconds, counted=True)
        result.seconds = time.perf_counter() - started
    return model, result


def _print(arguments: argparse.Namespace, model: Model, pictures: int, result: Result) -> None:
    rows = {
        "server": arguments.url,
        "model": f"{model.name}, {model.device} in {model.dtype}, {model.backend}, compile: {model.compiled}",
        "load": f"{arguments.concurrency} clients, {pictures} picture(s), attention {str(arguments.attention).lower()}",
        "client": f"httpx {httpx.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores shared",
        "answered": f"{len(result.latencies)} in {result.seconds:.1f} s",
    }
    if result.latencies:
        cuts = statistics.quantiles(result.latencies, n=100, method="inclusive") if len(result.latencies) > 1 else None
        # Each batch answers as many requests as it is large, so its size counts once for each of them.
        batches = sum(1 / size for size in result.batch_sizes)
        rows |= {
            "requests/s": f"{len(result.latencies) / result.seconds:.1f}",
            "p50": f"{1000 * statistics.median(result.latencies):.1f} ms",
            "p99": f"{1000 * (cuts[98] if cuts else result.latencies[0]):.1f} ms",
            "mean batch": f"{len(result.batch_sizes) / batches:.1f}",
        }
    if result.refused:
        rows["refused"] = ", ".join(f"{count} x {status}" for status, count in sorted(result.refused.items()))
    for name, value in rows.items():
        print(f"{name:12} {value}")  # noqa: T201
