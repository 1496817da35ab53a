"""`make fuzz`: hostile pictures, hostile bytes and schemathesis against a real server, and a table of what it did.

Pictures of hostile structure go to a server of their own, one by one, and each is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import re
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.fuzz import costs, pictures, streams
from tests.fuzz.openapi import schemathesis
from tests.fuzz.tally import Tally, table
from tests.launcher import ServerProcess

_REPOSITORY = Path(__file__).resolve().parents[2]
_WARM_UP, _STRUCTURES, _PICTURES, _STREAMS, _OPENAPI = 0.05, 0.3, 0.25, 0.2, 0.2
"""Shares of the time."""

_SHOWN = 3000
"""Characters of the server's log."""


def main() -> int:
    """Run all kinds for the minutes given.

    Return 1 on an unexpected server error, a lost answer, a dead server, or a file that costs too much.
    """
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seed", type=int, help="of an earlier run, whose cases are then sent again")
    parser.add_argument("--out", type=Path, default=_REPOSITORY / "runs" / "fuzz", help="for cases that went wrong")
    parser.add_argument("--only", choices=("structures",), help="this kind alone, for all of the time")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    alone = f" ONLY={options.only}" if options.only else ""
    print(f"seed {seed}: make fuzz MINUTES={options.minutes:g} SEED={seed}{alone}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    shared = Path(os.environ.get("VIT_SHARED", _REPOSITORY.parent / "shared"))
    if options.only:
        tally = _structures(shared, seed, options.minutes * 60, options.out)
        print(table([tally]))
        return int(bool(tally.faults))
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder) / "log") as server:
        return fuzz(server, shared, seed, options.minutes * 60, Path(folder), options.out)


def fuzz(server: ServerProcess, shared: Path, seed: int, seconds: float, folder: Path, out: Path) -> int:
    """Run all kinds, print the table, and return the exit code."""
    port, files = int(server.url.rpartition(":")[2]), pictures.starts(shared)
    # What is read and allocated once is no growth.
    warm_up = asyncio.run(pictures.send(port, files, seed + 1, out, seconds=_WARM_UP * seconds))
    warm_up.kind = "warm-up"
    before = _memory(server)
    tallies = [
        _structures(shared, seed, _STRUCTURES * seconds, out),
        warm_up,
        *_measured(server, lambda: [asyncio.run(pictures.send(port, files, seed, out, seconds=_PICTURES * seconds))]),
        *_measured(server, lambda: asyncio.run(streams.send(port, seed, out, seconds=_STREAMS * seconds))),
        *_measured(server, lambda: [_schemathesis(server, seed, _OPENAPI * seconds, folder)]),
    ]
    alive, log = _is_ready(server), server.log
    print(table(tallies))
    print(f"server {'alive' if alive else 'DEAD'}, RSS {before >> 20} MiB before, {_memory(server) >> 20} MiB after")
    traceback = log.rfind("Traceback")
    if traceback >= 0 or not alive:
        print(f"Its log:\n{log[traceback if traceback >= 0 else -_SHOWN :][:_SHOWN]}")
    good = alive and traceback < 0 and not any(tally.faults for tally in tallies)
    if not good:
        print(f"Cases that went wrong: {out}. Again: SEED={seed}")
    return 0 if good else 1


def _structures(shared: Path, seed: int, seconds: float, out: Path) -> Tally:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        return costs.send(lambda: ServerProcess(log), seed, shared / "data" / "hostile", out, seconds=seconds)


def _measured(server: ServerProcess, run: Callable[[], list[Tally]]) -> list[Tally]:
    """Run one part; what the server's memory grew meanwhile stands in its last line."""
    if not _is_ready(server):
        return []
    before = _memory(server)
    found = run()
    found[-1].growth = _memory(server) - before
    return found


def _memory(server: ServerProcess) -> int:
    """Return the server's resident bytes; 0 where it has ended."""
    return server.resident_bytes() if server.process.poll() is None else 0


def _is_ready(server: ServerProcess) -> bool:
    try:
        return server.process.poll() is None and httpx.get(f"{server.url}/readyz", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def _schemathesis(server: ServerProcess, seed: int, seconds: float, folder: Path) -> Tally:
    """Let schemathesis run; its requests are counted by the server."""
    tally = Tally("schemathesis")
    if importlib.util.find_spec("schemathesis") is None:
        tally.kind += " (not installed)"
        return tally
    before = _answers(server)
    # By number and not by time: a run that is cut short reports nothing.
    examples = f"--max-examples={max(5, round(seconds))}"
    done = schemathesis(server.url, examples, seed=seed, folder=folder, timeout=10 * seconds + 300)
    generated = re.search(r"(\d+) generated", done.stdout)
    tally.sent = int(generated[1]) if generated else 0
    if done.returncode or not tally.sent:
        tally.faults.append(done.stdout + done.stderr)
    tally.statuses = _answers(server) - before
    return tally


def _answers(server: ServerProcess) -> Counter[int]:
    """Return how many answers of each status the server has given; one to a caller that left is none."""
    found: Counter[int] = Counter()
    for name, value in server.metrics().items():
        if code := re.match(r'vit_requests_total\{code="(\d+)",endpoint="/(?!metrics|readyz)', name):
            found[int(code[1])] += round(value)
    del found[499]
    return found


if __name__ == "__main__":
    sys.exit(main())
