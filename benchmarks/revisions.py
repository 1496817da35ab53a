"""This tree beside another revision of it: `python -m benchmarks.revisions REVISION`. Has a change made it slower?

Both run on the same weights and pictures in turn (A B B A ...), each round with servers of its own; what is told is
the median of the rounds' ratios. The other revision is checked out into a temporary folder and runs with the packages
of this environment.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, pictures
from benchmarks.load import loader
from benchmarks.record import RESULTS, Record, table
from benchmarks.servers import OURS, Server, running


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement")
    parser.add_argument("--warm-seconds", type=float, default=4)
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
    while len(rounds) < arguments.rounds:
        # The order changes, so that a drift of the machine does not count for one side.
        order = list(servers) if len(rounds) % 2 == 0 else list(reversed(servers))
        measured: dict[str, Any] = {}
        for which in order:
            with running(servers[which], model, {}, picture=first) as server, loader(files, OURS) as load:
                load.closed(server.url, connections=arguments.connections, seconds=arguments.warm_seconds)
                found = load.closed(server.url, connections=arguments.connections, seconds=arguments.seconds)
                measured[which] = found.as_json()
        measured["ratio"] = round(measured["after"]["rate"] / measured["before"]["rate"], 4)
        rounds.append(measured)
        record.save()
        print(f"{name} round {len(rounds)}: {measured['ratio']:.3f}", file=sys.stderr)


def _print(models: dict[str, Any]) -> None:
    rows = []
    for name, section in models.items():
        rounds = section["rounds"]
        before, after = (statistics.median(round_[which]["rate"] for round_ in rounds) for which in ("before", "after"))
        ratios = [round_["ratio"] for round_ in rounds]
        spread = f"{min(ratios):.3f} ... {max(ratios):.3f}"
        rows.append([name, before, after, f"{statistics.median(ratios):.3f}", spread])
    print(table(["model", "before/s", "after/s", "ratio", "of all rounds"], rows))


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(checkpoints.REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
