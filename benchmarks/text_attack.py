"""Pictures beside requests of 1,000 new labels each: how much longer do the pictures wait?

    python -m benchmarks.text_attack CLIP_FOLDER [--seconds 8] [--rounds 2] [--workers 1]

Rounds with and without the attack take turns. Each prints pictures a second, their median and 95th percentile in
milliseconds, the statuses of the attack, and the milliseconds of requests with one new label beside it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.launcher import ServerProcess

PICTURE = (Path(__file__).parent.parent / "examples" / "dog.jpg").read_bytes()
CALLERS, ATTACKERS = 4, 4
NUMBERS = itertools.count()


def new_labels(count: int) -> str:
    """Return labels that no request had before."""
    return ",".join(f"thing number {next(NUMBERS)}" for _ in range(count))


def measure(url: str, seconds: float, *, attack: bool) -> str:
    """Return a line about a round."""
    end = time.monotonic() + seconds
    pictures: list[float] = []
    labelled: list[float] = []
    statuses: Counter[str] = Counter()

    def repeat(query: Callable[[], dict[str, str]], note: Callable[[float, int], None]) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while time.monotonic() < end:
                started = time.monotonic()
                response = client.post("/classify", params=query(), content=PICTURE)
                note(1000 * (time.monotonic() - started), response.status_code)

    def picture(milliseconds: float, status: int) -> None:
        assert status == 200, status
        pictures.append(milliseconds)

    def one_label(milliseconds: float, status: int) -> None:
        statuses[f"one label: {status}"] += 1
        labelled.append(milliseconds)

    def many() -> dict[str, str]:
        return {"labels": new_labels(1000)}

    def roles() -> Iterator[tuple[Callable[[], dict[str, str]], Callable[[float, int], None]]]:
        yield from [(dict, picture)] * CALLERS
        yield lambda: {"labels": f"a,{new_labels(1)}"}, one_label
        if attack:
            yield from [(many, lambda _, status: statuses.update([f"attack: {status}"]))] * ATTACKERS

    threads = [threading.Thread(target=repeat, args=role) for role in roles()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    median, slow = statistics.median(pictures), statistics.quantiles(pictures, n=20)[18]
    return (
        f"{'attack' if attack else 'calm  '}  {len(pictures) / seconds:6.1f} pictures/s  median {median:6.1f}  "
        f"95 % {slow:6.1f} ms   one label {statistics.median(labelled):7.1f} ms  {dict(statuses)}"
    )


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    settings = {"checkpoint": arguments.checkpoint, "labels": "cat,dog", "workers": arguments.workers, "max_batch": 8}
    with TemporaryDirectory() as folder, ServerProcess(Path(folder) / "log", **settings) as server:
        for _ in range(arguments.rounds):
            for attack in (False, True):
                print(measure(server.url, arguments.seconds, attack=attack), flush=True)


if __name__ == "__main__":
    main()
