"""Compare the speed of this tree with another revision: `python -m benchmarks.revisions REVISION`.

Both revisions serve the same weights at the same time. They get load in turn (A B B A ...), a few
seconds each, so that a drift of the machine affects both alike. The record has medians of the
rounds' ratios: requests per second, the server's CPU time per request, and the CPU time of its
event loop (the process's first thread). Each count of `--connections` is a row; 1 is a lone request
on an idle server. The other revision is checked out into a temporary folder, and runs with the
packages of this environment.
"""

import argparse
import shutil
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, pictures
from benchmarks.load import Loader
from benchmarks.record import Record, command_line, git, table
from benchmarks.servers import OURS, Running, Server, running


def main() -> None:
    """Measure, then print the table of the record."""
    parser = command_line("revisions", __doc__, rounds=10, seconds=4)
    parser.add_argument("revision", help="what to compare with, as git names it")
    parser.add_argument(
        "--models", nargs="+", default=list(checkpoints.SHAPES), choices=list(checkpoints.SHAPES)
    )
    parser.add_argument("--connections", type=int, nargs="+", default=[32])
    parser.add_argument(
        "--setting", action="append", default=[], metavar="VIT_NAME=VALUE", help="of both servers"
    )
    arguments = parser.parse_args()
    files, origin = pictures.ensure()
    revisions = {"before": git("rev-parse", "--short", arguments.revision), "after": "this tree"}
    about = {"pictures": origin, "settings": arguments.setting, "revisions": revisions}
    record = Record(arguments.record, dtype="auto", about=about)
    with tempfile.TemporaryDirectory(prefix="vitserve-revision-") as folder:
        other = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(other), arguments.revision)
        try:
            for library in (checkpoints.REPOSITORY / "model" / "images").glob(
                "*.so"
            ):  # else Pillow resizes there
                shutil.copy(library, other / "model" / "images")
            _declare_extensions(other)
            # -P: the folder that it is started in is this tree, whichever is to be measured.
            start = ("-P", "-m", "service", "serve")
            trees = {"before": other, "after": checkpoints.REPOSITORY}
            servers = {
                which: Server("vitserve", start, OURS, "vitserve", extra={"PYTHONPATH": str(tree)})
                for which, tree in trees.items()
            }
            for name in arguments.models:
                _measure(record, name, servers, files, arguments)
        finally:
            git("worktree", "remove", "--force", str(other))
    _print(record.data["models"])


def _declare_extensions(tree: Path) -> None:
    """Write a tree's entry points where its packages lie: those installed are of this tree."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    metadata = tree / f"{project['name']}-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def _measure(
    record: Record,
    name: str,
    servers: dict[str, Server],
    files: list[Path],
    arguments: argparse.Namespace,
) -> None:
    model, origin = checkpoints.ensure(checkpoints.SHAPES[name])
    record.section("models", name)["weights"] = origin
    loads = record.section("models", name, "connections")
    settings = dict(pair.split("=", 1) for pair in arguments.setting)
    first = files[0].read_bytes()
    with (
        running(servers["before"], model, settings, picture=first) as before,
        running(servers["after"], model, settings, picture=first) as after,
    ):
        load = Loader(files, OURS)
        started = {"before": before, "after": after}
        for server in started.values():
            load.run(server.url, connections=32, seconds=3)
        for number in range(arguments.rounds):
            order = list(started) if number % 2 == 0 else list(reversed(started))
            for count in arguments.connections:
                found = {
                    which: _load(started[which], load, count, arguments.seconds) for which in order
                }
                loads.setdefault(str(count), []).append(found)
                record.save()
                print(f"{name}, {count} connections: {found}", flush=True)


def _load(server: Running, load: Loader, connections: int, seconds: float) -> dict[str, Any]:
    """Return the clients' figures, and the server's CPU milliseconds per request."""
    # The nanoseconds that the first thread has run (proc(5)).
    event_loop = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/schedstat")
    cpu = server.processor_seconds()
    loop = int(event_loop.read_text().split()[0])
    found = load.run(server.url, connections=connections, seconds=seconds)
    cpu = server.processor_seconds() - cpu
    loop = int(event_loop.read_text().split()[0]) - loop
    requests = found.rate * seconds
    took = {"cpu_ms": round(1000 * cpu / requests, 3), "loop_ms": round(1e-6 * loop / requests, 3)}
    return {**found.as_json(), **took}


def _print(models: dict[str, Any]) -> None:
    rows = []
    for name, section in models.items():
        for count, rounds in section["connections"].items():
            for value in ("rate", "p50", "cpu_ms", "loop_ms"):
                medians = [
                    statistics.median(each[which][value] for each in rounds)
                    for which in ("before", "after")
                ]
                ratios = [each["after"][value] / each["before"][value] for each in rounds]
                spread = f"{min(ratios):.3f} ... {max(ratios):.3f}"
                rows.append(
                    [
                        f"{name}, {count}, {value}",
                        *medians,
                        f"{statistics.median(ratios):.3f}",
                        spread,
                    ]
                )
    print(table(["", "before", "after", "ratio", "of all rounds"], rows))


if __name__ == "__main__":
    main()
