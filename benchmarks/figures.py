"""Pictures of the records: `python -m benchmarks.figures` (needs the extra `figures`).

throughput.svg   answered per second and p99 by connections, and by web workers
peers.svg        answered per second, ours, the peers', and darker, the peers' with our graph
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.report import OPENVINO, TITLES, is_peer
from benchmarks.record import RESULTS, medians

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _THEIRS, _THEIRS_WITH_OUR_GRAPH = "#1f6f8b", "#b8b8b8", "#707070"


def main() -> int:
    """Draw what the records hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for name, draw in (("cpu.json", throughput), ("peers.json", peers)):
        record = arguments.results / name
        if record.exists():
            print(draw(json.loads(record.read_text()), arguments.output))
    return 0


def throughput(data: dict[str, Any], folder: Path) -> Path:
    """Lines over connections and over workers; the file that was written."""
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    axes[0].set_xscale("log", base=2)
    for name, model in data["models"].items():
        for axis, key, label in ((axes[0], "connections", "connections"), (axes[1], "workers", "web workers")):
            if model.get(key):
                _load(axis, model[key], f"{name}: answered/s", label)
    path = folder / "throughput.svg"
    figure.savefig(path)
    plt.close(figure)
    return path


def _load(axis: Axes, done: dict[str, Any], name: str, label: str) -> None:
    counts = [int(count) for count in done]
    axis.plot(counts, [one["rate"] for one in done.values()], "o-", color=_OURS, label=name)
    axis.set(xlabel=label, ylabel="answered per second", xticks=counts, xticklabels=counts, ylim=(0, None))
    tail = axis.twinx()
    tail.plot(counts, [one["p99"] for one in done.values()], "s--", color=_THEIRS, label="p99")
    tail.set(ylabel="p99, ms", ylim=(0, None))
    axis.plot([], [], "s--", color=_THEIRS, label="p99, ms")
    axis.legend(loc="lower right", frameon=False)


def peers(data: dict[str, Any], folder: Path) -> Path:
    """Bars by server, one panel a model; the file that was written."""
    from matplotlib import pyplot as plt  # noqa: PLC0415

    models = data["models"]
    rows = max(len(model.get("rounds", {})) for model in models.values())
    size = (5 * len(models), 1 + 0.24 * rows)
    figure, axes = plt.subplots(1, len(models), figsize=size, layout="constrained", squeeze=False)
    for axis, (name, model) in zip(axes[0], models.items(), strict=True):
        rates = {server: medians(done)["rate"] for server, done in model.get("rounds", {}).items() if done}
        ordered = sorted(rates, key=lambda server: rates[server])
        theirs = [_THEIRS_WITH_OUR_GRAPH if server.endswith(OPENVINO) else _THEIRS for server in ordered]
        colours = [colour if is_peer(server) else _OURS for server, colour in zip(ordered, theirs, strict=True)]
        bars = axis.barh(ordered, [rates[server] for server in ordered], color=colours)
        axis.bar_label(bars, fmt="%.0f", padding=3)
        axis.set(title=TITLES.get(name, name), xlabel="answered per second")
        axis.title.set_fontsize(9)
        axis.margins(x=0.12)
    path = folder / "peers.svg"
    figure.savefig(path)
    plt.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
