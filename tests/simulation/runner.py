"""Runs many seeds, in several processes: a seed needs one core and nothing of the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.simulation.world import run_seed

_REPOSITORY = Path(__file__).resolve().parents[2]


def run_range(seeds: Sequence[int]) -> list[str]:
    """Run seeds one after another; return a line for each that failed, which says how to replay it."""
    failures = []
    for seed in seeds:
        violation, _ = run_seed(seed)
        if violation is not None:
            failures.append(f"python -m tests.simulation --seed {seed}: {violation}")
    return failures


def run_in_processes(seeds: range, jobs: int) -> list[str]:
    """Run seeds in `jobs` processes; return what `run_range` returns, and what a process that broke down wrote."""
    share = -(-len(seeds) // jobs)
    shares = [seeds[start : start + share] for start in range(0, len(seeds), share)]
    command = [sys.executable, "-m", "tests.simulation", "--jobs", "1", "--seeds"]
    processes = [
        subprocess.Popen(
            [*command, f"{part[0]}:{part[-1] + 1}"],
            cwd=_REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in shares
    ]
    failures = []
    for process in processes:
        output, errors = process.communicate()
        failures += output.splitlines()
        if process.returncode and not output:
            failures.append(errors)
    return failures
