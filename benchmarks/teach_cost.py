"""Cost of taught heads for plain classification: `python -m benchmarks.teach_cost`.

A plain server is compared with a taught one, whose head has answered, so that its graph of transfer
features is kept and loaded. Both start from kept graphs. Requests of one client alternate between
the servers, and between the heads of the taught one. Shares are ratios of median seconds, so that
other work on the machine affects both sides alike. Processor time counts all processes of a server.
"""

import http.client
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.checkpoints import REPOSITORY, shared_folder
from benchmarks.record import Record, command_line
from benchmarks.servers import OURS, VITSERVE, Running, resident_mib, running
from vitserve.client import Client

_HEAD: Final = "pets"
# Requests to a head in turn, whose processor time is measured together.
_BLOCK: Final = 25
# Time in which graphs of all sizes are made.
_GRAPHS_SECONDS: Final = 30


class Caller:
    """One client of a server, with the seconds of its answers.

    Args:
        server: the server.
        path: path of the requests, which choose a head.
        picture: JPEG to classify.
    """

    def __init__(self, server: Running, path: str, picture: bytes) -> None:
        self.seconds: list[float] = []
        self.processor_seconds = 0.0
        self._server = server
        self._connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
        self._path = path
        self._body = OURS.wrap(picture)

    def reset(self) -> None:
        """Forget the measurements."""
        self.seconds = []
        self.processor_seconds = 0.0

    def classify(self) -> None:
        """Send a request, and wait for the answer."""
        began = time.perf_counter()
        self._connection.request("POST", self._path, self._body, OURS.headers)
        answer = self._connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        self.seconds.append(time.perf_counter() - began)

    def block(self) -> None:
        """Send some requests without a pause, and measure the server's processor time."""
        began = self._server.processor_seconds()
        for _ in range(_BLOCK):
            self.classify()
        self.processor_seconds += self._server.processor_seconds() - began

    def as_json(self) -> dict[str, float]:
        """Return the medians, in milliseconds."""
        processor = 1000 * self.processor_seconds / len(self.seconds)
        return {
            "median_ms": round(1000 * statistics.median(self.seconds), 2),
            "processor_ms": round(processor, 2),
        }


def share(plain: Caller, other: Caller) -> dict[str, float]:
    """Return the rate of the other caller relative to the plain one, by time and processor time."""
    seconds = statistics.median(plain.seconds) / statistics.median(other.seconds)
    return {
        "rate": round(seconds, 3),
        "by_processor_time": round(plain.processor_seconds / other.processor_seconds, 3),
    }


def cost(model: Path, rounds: int) -> dict[str, Any]:
    """Return starts, memory and rates of a plain server and of a taught one."""
    names = ("cat", "dog", "cat_close", "dog_close")
    pictures = [(REPOSITORY / "examples" / f"{name}.jpg").read_bytes() for name in names]
    with TemporaryDirectory() as folder:
        configs = {
            name: {"VIT_CACHE_DIR": f"{folder}/{name}", "VIT_TEACH": f"{folder}/{name}-heads"}
            for name in ("plain", "taught")
        }
        for name, config in configs.items():
            with running(VITSERVE, model, config, picture=pictures[0]) as server:
                if name == "taught":
                    _teach(server.url, pictures)
        starts = _starts(model, configs, pictures[0], rounds)
        with ExitStack() as stack:
            plain, taught = (
                stack.enter_context(running(VITSERVE, model, config, picture=pictures[0]))
                for config in configs.values()
            )
            callers = {
                "plain server": Caller(plain, OURS.path, pictures[1]),
                "taught server, own head": Caller(taught, OURS.path, pictures[1]),
                "taught server, taught head": Caller(
                    taught, f"{OURS.path}?model={_HEAD}", pictures[1]
                ),
            }
            for caller in callers.values():
                caller.block()
            time.sleep(_GRAPHS_SECONDS)
            memory = {
                name: resident_mib(server.process.pid)
                for name, server in (("plain", plain), ("taught", taught))
            }
            for caller in callers.values():
                caller.reset()
            for number in range(4 * rounds):
                for caller in _in_turn([*callers.values()], number):
                    caller.block()
    reference, own, by_head = callers.values()
    return {
        "memory_mib": memory,
        "second start": starts,
        "answers": {name: caller.as_json() for name, caller in callers.items()},
        "plain classification": share(reference, own),
        "taught head": share(own, by_head),
    }


def _in_turn(callers: Sequence[Any], number: int) -> Sequence[Any]:
    """Return the callers in an order that differs from round to round."""
    first = number % len(callers)
    return [*callers[first:], *callers[:first]]


def _teach(url: str, pictures: Sequence[bytes]) -> None:
    """Teach a head, and wait until a graph answers with it."""
    with Client(url) as client:
        for number, picture in enumerate(pictures):
            client.teach(_HEAD, ("cat", "dog")[number % 2], picture)
        while not client.head(_HEAD).up_to_date:
            time.sleep(0.1)
        client.classify(pictures[0], model=_HEAD)
        time.sleep(_GRAPHS_SECONDS)


def _starts(
    model: Path, configs: Mapping[str, Mapping[str, str]], picture: bytes, rounds: int
) -> dict[str, Any]:
    """Return the medians of second starts, by the kind of server."""
    starts: dict[str, list[tuple[float, float]]] = {name: [] for name in configs}
    for number in range(rounds):
        for name in _in_turn([*configs], number):
            with running(VITSERVE, model, configs[name], picture=picture) as server:
                starts[name].append((server.answer_seconds, server.processor_seconds()))
    return {
        name: {
            "seconds": round(statistics.median(seconds for seconds, _ in values), 2),
            "processor_seconds": round(statistics.median(spent for _, spent in values), 2),
        }
        for name, values in starts.items()
    }


def main() -> None:
    """Measure, print, and save the record."""
    parser = command_line("teach-cost", __doc__, rounds=7, seconds=0)
    arguments = parser.parse_args()
    about = {"model": "DeiT-tiny/16, ImageNet-1k", "requests": f"{_BLOCK} in turn, 4 a round"}
    record = Record(arguments.record, dtype="auto (bfloat16 where native)", about=about)
    deit = shared_folder() / "weights" / "deit_tiny_imagenet"
    record.note(cost(deit, arguments.rounds), "cost")


if __name__ == "__main__":
    main()
