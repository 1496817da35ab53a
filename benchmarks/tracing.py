"""What tracing costs: processor time of a request without it, unsampled and sampled. `python -m benchmarks.tracing`.

Three services of two workers each are asked in turn, round after round, over eight connections. Told are the medians
over the rounds of the processor time of workers and of the engine, user's and system's, for each request; differences
are those within a round. Processor time hardly changes when other work wants the same cores. The spans go to a
receiver that reads and forgets them.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from PIL import Image

from benchmarks.checkpoints import REPOSITORY
from benchmarks.record import table
from benchmarks.reliability.http_caller import HttpCaller
from benchmarks.reliability.service_process import ServiceProcess, processor_seconds
from benchmarks.reliability.traffic import post

_SERVICES: Final = {
    "off": {},
    "not sampled": {"VIT_OTEL": "true", "OTEL_TRACES_SAMPLER": "always_off"},
    "sampled": {"VIT_OTEL": "true"},
}
_CONNECTIONS = 8


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=1000, help="of a service in a round")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        endpoint = stack.enter_context(_receiver())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vitserve-tracing-")))
        services = {}
        for name, settings in _SERVICES.items():
            common = {"VIT_WORKERS": "2", "VIT_THREADS": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
            services[name] = ServiceProcess(folder / f"{name}.log", common | settings)
            stack.callback(services[name].stop)
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in services}
        for service in services.values():
            service.wait_until_ready()
            _cost(service, arguments.requests)
        for _ in range(arguments.rounds):
            for name, service in services.items():
                rounds[name].append(_cost(service, arguments.requests))
    rows = []
    for name, costs in rounds.items():
        row: list[object] = [name]
        for process in (0, 1):
            values = [1e6 * cost[process] for cost in costs]
            more = [1e6 * (cost[process] - off[process]) for cost, off in zip(costs, rounds["off"], strict=True)]
            row += [statistics.median(values), f"{statistics.median(more):+.0f} ({min(more):+.0f} to {max(more):+.0f})"]
        rows.append(row)
    print(table(["µs a request", "workers", "more than off", "engine", "more than off"], rows))
    return 0


def _cost(service: ServiceProcess, requests: int) -> tuple[float, float]:
    """Return the seconds of processor time that a request takes of the workers and of the engine."""
    groups: list[Callable[[], list[int]]] = [service.workers, service.engines]
    before = [processor_seconds(group()) for group in groups]
    asyncio.run(_ask(service.port, requests))
    workers, engine = (processor_seconds(group()) - used for group, used in zip(groups, before, strict=True))
    return workers / requests, engine / requests


async def _ask(port: int, requests: int) -> None:
    """Classify a small picture as often, over some connections at once.

    Raises:
        RuntimeError: an answer is not 200.
    """
    with Image.open(REPOSITORY / "examples/dog.jpg") as picture, io.BytesIO() as buffer:
        picture.resize((64, 64)).save(buffer, "JPEG")
        request = post("/classify", buffer.getvalue())
    caller = HttpCaller("127.0.0.1", port, patience=60)

    async def one() -> None:
        for _ in range(requests // _CONNECTIONS):
            answer = await caller.ask(request)
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.body!r}")

    await asyncio.gather(*(one() for _ in range(_CONNECTIONS)))
    caller.close()


class _Handler(BaseHTTPRequestHandler):
    """Takes spans as a collector does, and forgets them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Read all and answer with an empty message."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def _receiver() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
