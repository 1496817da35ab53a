"""Runs seeds: `python -m tests.simulation --seed 17` replays one with its trace, `--seeds 0:10000` runs many."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.runner import run_in_processes, run_range
from tests.simulation.world import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="replay this seed and print what happens")
    which.add_argument("--seeds", help="run seeds A to B-1, as A:B; a single number is 0:B")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default one a core")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        violation, trace = run_seed(arguments.seed, trace=True)
        print(*trace, sep="\n")
        print(f"seed {arguments.seed}: {violation or 'every invariant holds'}")
        return int(violation is not None)
    first, _, last = arguments.seeds.rpartition(":")
    seeds = range(int(first or 0), int(last))
    started = time.perf_counter()
    failures = run_range(seeds) if arguments.jobs == 1 else run_in_processes(seeds, arguments.jobs)
    for failure in failures:
        print(failure)
    print(f"{len(seeds)} seeds in {time.perf_counter() - started:.1f} s: {len(failures)} failed", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
