"""Compare vitserve with its peers: `python -m benchmarks.peers`.

Figures are medians over interleaved rounds, and ratios within rounds. All servers start and warm up
before the first measurement. Idle servers are stopped (SIGSTOP), because some poll. Every
measurement is saved at once.
"""

import argparse
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from torch import Tensor

from benchmarks import checkpoints, pictures
from benchmarks.load import Loader
from benchmarks.peers.common import GRAPH, Decoder, Options, probabilities_of
from benchmarks.record import Record, command_line, table
from benchmarks.servers import SERVERS, VITSERVE, Running, ask, running
from model.checkpoint import load_checkpoint
from model.runtime.openvino.tracing import convert
from model.runtime.torch_pass import Normalise

_OURS = f"{VITSERVE.name}, openvino"
_CONNECTIONS = 32
# Least distance of the two best scores of a picture whose best class has to be the same everywhere.
_MARGIN = 0.02
# torch.compile takes its time while others use the machine.
_START_SECONDS = 400


class _Logits(torch.nn.Module):
    def __init__(self, network: torch.nn.Module, normalise: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self.normalise = normalise

    def forward(self, images: Tensor) -> Tensor:
        """Pictures, uint8 [B, H, W, C], to logits."""
        return self.network(self.normalise(images)).logits


def write_graph(folder: Path) -> None:
    """Write vitserve's graph of a model into its folder if it is absent, for peers with OpenVINO.

    It is made by vitserve's own conversion, normalisation included, for batches of any size. It
    gives the logits alone: the attention row of the last layer, which vitserve's own graph gives
    too, no peer needs.
    """
    if not (folder / GRAPH).exists():
        checkpoint = load_checkpoint(str(folder))
        network = _Logits(checkpoint.build().eval(), Normalise(checkpoint.preprocess))
        graph = convert(
            network, torch.zeros((2, *checkpoint.config.image_size, 3), dtype=torch.uint8)
        )
        openvino.save_model(graph, folder / GRAPH, compress_to_fp16=False)


def compare(
    record: Record, name: str, files: Sequence[Path], arguments: argparse.Namespace
) -> None:
    """Measure one model: every server in turn."""
    model, origin = checkpoints.ensure(checkpoints.SHAPES[name])
    write_graph(model)
    record.section("models", name)["weights"] = origin
    rounds = record.section("models", name, "rounds")
    with ExitStack() as stack:
        started = _start(stack, record, model, files, arguments.servers)
        for load, server, held in started.values():
            with server.thawed(held=held):
                load.run(server.url, connections=_CONNECTIONS, seconds=arguments.warm_seconds)
        for _ in range(arguments.rounds):
            for row, (load, server, held) in started.items():
                with server.thawed(held=held):
                    load.run(server.url, connections=_CONNECTIONS, seconds=1)
                    found = load.run(
                        server.url, connections=_CONNECTIONS, seconds=arguments.seconds
                    )
                rounds.setdefault(row, []).append(found.as_json())
                record.save()
                print(f"{name}, {row}: {found}", file=sys.stderr, flush=True)


def _start(
    stack: ExitStack, record: Record, model: Path, files: Sequence[Path], names: Sequence[str]
) -> dict[str, tuple[Loader, Running, bool]]:
    """Start the servers, and compare their answers; the record says why some do not start. The
    last: may it be held?
    """
    started = {}
    pictures_ = [file.read_bytes() for file in files]
    expected = _reference(model, files)
    chosen = [
        (server, name)
        for server in SERVERS
        for name in server.configs
        if server.name in (VITSERVE.name, *names)
    ]
    for server, name in chosen:
        row = f"{server.name}, {name}"
        config = {"PEER_ENGINE": name.split(",")[0], **server.configs[name]}
        try:
            record.section("servers")[server.name] = server.version()
            one = running(server, model, config, picture=pictures_[0], timeout=_START_SECONDS)
            running_ = stack.enter_context(one)
        except (
            OSError,
            subprocess.CalledProcessError,
            RuntimeError,
        ) as error:  # make bench-peers installs the peers
            record.note(str(error)[-500:], "models", model.name, "failed", row)
            continue
        started[row] = (Loader(files, server.protocol), running_, server.held)
        with running_.thawed(held=server.held):
            answers = [ask(running_.url, server.protocol, picture) for picture in pictures_]
        sure = [
            best == got
            for (best, margin), got in zip(expected, answers, strict=True)
            if margin > _MARGIN
        ]
        record.section("models", model.name, "top1")[row] = f"{sum(sure)} of {len(sure)} the same"
    return started


def _reference(model: Path, files: Sequence[Path]) -> list[tuple[int, float]]:
    """The best class of each picture in float32 in this process, and how far its score is from the
    next.
    """
    decode = Decoder(model)
    probabilities = probabilities_of(Options(model=model, threads=2, batch=1, dtype="float32"))
    rows = np.concatenate([probabilities([decode(file.read_bytes())]) for file in files])
    top = np.sort(rows, axis=1)
    return list(zip(rows.argmax(axis=1).tolist(), (top[:, -1] - top[:, -2]).tolist(), strict=True))


def report(data: Mapping[str, Any]) -> str:
    """Return each model's servers as Markdown, fastest first, relative to vitserve's rounds."""
    lines = []
    for name, model in data["models"].items():
        rows = []
        for row, done in model["rounds"].items():
            pairs = zip(done, model["rounds"][_OURS], strict=False)
            share = statistics.median(theirs["rate"] / ours["rate"] for theirs, ours in pairs)
            rate, p50, p99 = (
                statistics.median(each[name] for each in done) for name in ("rate", "p50", "p99")
            )
            lost = sum(each["refused"] + each["broken"] for each in done)
            rows.append((row, rate, f"{share:.2f}", p50, p99, lost, model["top1"].get(row)))
        rows.sort(key=lambda row: -row[1])
        lines.append(
            table([name, "answered/s", "of vitserve's", "p50 ms", "p99 ms", "lost", "top-1"], rows)
        )
    return "\n\n".join(lines)


def main() -> None:
    """Measure, then print the tables of the record."""
    servers = [server.name for server in SERVERS]
    parser = command_line("peers", __doc__, rounds=5, seconds=4)
    parser.add_argument(
        "--models", nargs="+", default=list(checkpoints.SHAPES), choices=list(checkpoints.SHAPES)
    )
    parser.add_argument(
        "--servers", nargs="+", default=servers, choices=servers, help="beside vitserve"
    )
    parser.add_argument("--warm-seconds", type=float, default=20)
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("ended")
    )  # a run that is ended stops its servers
    files, origin = pictures.ensure()
    record = Record(
        arguments.record, dtype="bfloat16", about={"pictures": origin, "connections": _CONNECTIONS}
    )
    for name in arguments.models:
        compare(record, name, files, arguments)
    print(report(record.data))


if __name__ == "__main__":
    main()
