"""This tree beside another revision of it: `python -m benchmarks.revisions REVISION`. Has a change made it slower?

Both serve the same weights at the same time and are loaded in turn (A B B A ...), a few seconds each, so that a drift
of the machine counts for neither; the one that is not loaded idles. What is told is the median of the rounds' ratios,
of requests answered per second and of the server's CPU time per request. The other revision is checked out into a
temporary folder and runs with the packages of this environment.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, pictures
from benchmarks.load import Loader, loader
from benchmarks.record import RESULTS, Record, table
from benchmarks.servers import OURS, Running, Server, running


def main() -> int:
    """Measure what the record lacks, then print its table."""
    arguments = _arguments()
    files, origin = pictures.ensure()
    record = Record(arguments.record, dtype="auto", about={"pictures": origin, "connections": arguments.connections})
    with tempfile.TemporaryDirectory(prefix="vitserve-revision-") as folder:
        other = Path(folder) / "tree"
        _git("worktree", "add", "--detach", str(other), arguments.revision)
        try:
            servers = {"before": _server(other), "after": _server(checkpoints.REPOSITORY)}
            record.data["revisions"] = {
                "before": _git("rev-parse", "--short", arguments.revision),
                "after": "this tree",
            }
            for name in arguments.models:
                _measure(record, name, servers, files, arguments)
        finally:
            _git("worktree", "remove", "--force", str(other))
    _print(record.data["models"])
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=__doc__)
    parser.add_argument("revision", help="what to compare with, as git names it")
    parser.add_argument("--models", nargs="+", default=list(checkpoints.SHAPES), choices=list(checkpoints.SHAPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    parser.add_argument("--warm-seconds", type=float, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--record", type=Path, default=RESULTS / "revisions.json")
    return parser.parse_args()


def _server(tree: Path) -> Server:
    # -P: the folder that it is started in is this tree, whichever is to be measured.
    return Server("vitserve", ("-P", "-m", "service", "serve"), OURS, "vitserve", extra={"PYTHONPATH": str(tree)})


def _measure(
    record: Record, name: str, servers: dict[str, Server], files: list[Path], arguments: argparse.Namespace
) -> None:
    model, origin = checkpoints.ensure(name)
    section = record.section("models", name)
    section["weights"] = origin
    rounds: list[dict[str, Any]] = section.setdefault("rounds", [])
    first = files[0].read_bytes()
    if len(rounds) >= arguments.rounds:
        return
    with (
        running(servers["before"], model, {}, picture=first) as before,
        running(servers["after"], model, {}, picture=first) as after,
        loader(files, OURS) as load,
    ):
        started = {"before": before, "after": after}
        for server in started.values():
            load.closed(server.url, connections=arguments.connections, seconds=arguments.warm_seconds)
        while len(rounds) < arguments.rounds:
            order = list(started) if len(rounds) % 2 == 0 else list(reversed(started))
            rounds.append({which: _load(started[which], load, arguments) for which in order})
            record.save()
            print(f"{name} round {len(rounds)}: {_ratio(rounds[-1], 'rate'):.3f}", file=sys.stderr)


def _load(server: Running, load: Loader, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the clients saw, and the milliseconds of CPU time that a request took the server."""
    pids = server.pids()
    cpu = _cpu_seconds(pids)
    found = load.closed(server.url, connections=arguments.connections, seconds=arguments.seconds)
    cpu = _cpu_seconds(pids) - cpu
    return {**found.as_json(), "cpu_ms": round(1000 * cpu / (found.rate * arguments.seconds), 3)}


def _cpu_seconds(pids: list[int]) -> float:
    """Return the user and system time of some processes, all their threads included (proc(5))."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def _ratio(round_: dict[str, Any], value: str) -> float:
    ratio: float = round_["after"][value] / round_["before"][value]
    return ratio


def _print(models: dict[str, Any]) -> None:
    rows = []
    for name, section in models.items():
        rounds = section["rounds"]
        for value in ("rate", "cpu_ms"):
            medians = [statistics.median(round_[which][value] for round_ in rounds) for which in ("before", "after")]
            ratios = [_ratio(round_, value) for round_ in rounds]
            spread = f"{min(ratios):.3f} ... {max(ratios):.3f}"
            rows.append([f"{name}, {value}", *medians, f"{statistics.median(ratios):.3f}", spread])
    print(table(["", "before", "after", "ratio", "of all rounds"], rows))


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(checkpoints.REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
