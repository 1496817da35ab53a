"""Maps behind classification: `python -m benchmarks.explanations`. Does classification keep its p99 meanwhile?

Both are open loops of a Poisson process: classification at a rate that the service holds easily, and maps of a method
that needs a whole backward pass (`gae`) at a tenth of it. Rounds without and with maps take turns on one server, and
the number is the ratio of their medians of classification's p99; it is to stay below 1.5.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, pictures
from benchmarks.load import Load, Protocol
from benchmarks.loadgen import Plan, load
from benchmarks.record import RESULTS, Record, medians, table
from benchmarks.servers import JPEG, OURS, VITSERVE, running
from model.outputs import METHODS

BOUND = 1.5
"""Times the p99 without maps that classification may have with them."""

_SHARE_OF_PEAK = 0.4
"""Classification's rate, of what the service answers at most: with the maps beside it, it is still not overloaded."""


def maps_protocol(method: str) -> Protocol:
    """Return how a map of the best class is asked for."""
    return Protocol(f"/attention?method={method}&format=json", JPEG, OURS.wrap, OURS.top1)


def measure(classify: Plan, maps: Plan | None) -> tuple[Load, Load | None]:
    """Send both at once; return what the callers of each saw."""
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(load, maps, processes=1) if maps is not None else None
        return load(classify, processes=1), others.result() if others is not None else None


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the medians over the rounds, in milliseconds and per second, and the ratio of the two p99."""
    quiet = medians(one["quiet"] for one in rounds)
    beside, maps = medians(one["beside"] for one in rounds), medians(one["maps"] for one in rounds)
    return {
        "quiet_p50": quiet["p50"],
        "quiet_p99": quiet["p99"],
        "beside_p50": beside["p50"],
        "beside_p99": beside["p99"],
        "maps_rate": maps["rate"],
        "maps_p99": maps["p99"],
        "ratio": beside["p99"] / quiet["p99"],
    }


def report(section: dict[str, Any]) -> str:
    """Return a measurement as Markdown."""
    found = summary(section["rounds"])
    rows = [
        ("classification alone", section["rate"], found["quiet_p50"], found["quiet_p99"]),
        (f"classification beside {section['method']}", section["rate"], found["beside_p50"], found["beside_p99"]),
        (f"maps by {section['method']}", found["maps_rate"], None, found["maps_p99"]),
    ]
    loads = ", ".join(f"{one['load_average']:.1f}" for one in section["rounds"])
    return (
        table(("", "requests/s", "p50 ms", "p99 ms"), rows)
        + f"\n\np99 beside maps over p99 alone: {found['ratio']:.2f} (bound {BOUND}), {len(section['rounds'])} rounds; "
        + f"load of the machine before each: {loads}"
    )


def main() -> int:
    """Measure the rounds that the record lacks, then print the table; 1 if classification does not keep its p99."""
    arguments = _arguments()
    files, origin = pictures.ensure()
    record = Record(arguments.record, dtype="auto (bfloat16 where native)", about={"pictures": origin})
    section = record.section(f"{arguments.model} {arguments.method}")
    rounds: list[dict[str, Any]] = section.setdefault("rounds", [])
    model = Path("bundled") if arguments.model == "bundled" else checkpoints.ensure(arguments.model)[0]
    bodies = [file.read_bytes() for file in files]
    with running(VITSERVE, model, {}, picture=bodies[0]) as server:
        peak = Plan(server.url, OURS, bodies, arguments.seconds / 2, connections=16)
        load(peak, processes=1)
        section["rate"] = rate = arguments.rate or section.get("rate") or _SHARE_OF_PEAK * load(peak, processes=1).rate
        section["method"] = arguments.method
        classify = Plan(server.url, OURS, bodies, arguments.seconds, rate=rate)
        maps = replace(classify, protocol=maps_protocol(arguments.method), rate=rate / 10)
        measure(replace(classify, seconds=2), replace(maps, seconds=2, rate=2))  # warms the maps' way
        while len(rounds) < arguments.rounds:
            found: dict[str, Any] = {"load_average": os.getloadavg()[0]}
            for beside in (False, True) if len(rounds) % 2 == 0 else (True, False):
                seen, of_maps = measure(classify, maps if beside else None)
                found["beside" if beside else "quiet"] = seen.as_json()
                if of_maps is not None:
                    found["maps"] = of_maps.as_json()
            rounds.append(found)
            record.save()
            print(
                f"round {len(rounds)}: p99 {found['quiet']['p99']:.1f} ms, {found['beside']['p99']:.1f} ms beside maps"
            )
    print(report(section))
    return int(summary(rounds)["ratio"] > BOUND)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.explanations", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit224", choices=["bundled", *checkpoints.SHAPES])
    parser.add_argument("--method", default="gae", choices=METHODS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement")
    parser.add_argument("--rate", type=float, help=f"of classification; default: {_SHARE_OF_PEAK} of the peak")
    parser.add_argument("--record", type=Path, default=RESULTS / "explanations.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
