"""Int8 beside float32 and bfloat16, how fast and how alike: `python -m benchmarks.int8 CHECKPOINT --data photos/`.

It goes in two steps, so that only the second needs a machine that does nothing else. `--step graphs` quantises the
checkpoint for several agreements (minutes), writes the graphs to `--work`, and records how often each has float32's
best class on pictures that it was not calibrated on. `--step rates` times them in turns, in batches of 8 on two
streams. `ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI` and `--dtype float32` stand for a CPU without bfloat16. CIFAR-10's
folder as `--data` means: calibrated on training pictures, measured on all 10,000 test pictures.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.record import RESULTS, Record, table
from model.checkpoint import load_checkpoint
from model.config import PreprocessConfig
from model.data import cifar10
from model.data.datasets import is_cifar10
from model.runtime.batches import BatchRequest
from model.runtime.openvino.graph import Requests, core, openvino_package
from model.runtime.openvino.quantization import Quantiser, compare, graph_logits, int8_graph
from model.runtime.openvino.tracing import trace
from model.runtime.torch_backend import TorchOptions
from service.cli.quantised import CALIBRATED, TESTED, split_pictures, views_of

if TYPE_CHECKING:
    import openvino

_LEAST: Final = (0.0, 0.975, 0.99)
_BATCH: Final = 8
_STREAMS: Final = 2


def main() -> None:
    """Run the steps that are asked for, record them and print the table."""
    arguments = _arguments()
    record = Record(arguments.record, dtype="see the rows", about={"threads": _STREAMS, "batch": _BATCH})
    if arguments.step in ("graphs", "both"):
        _make_graphs(arguments, record)
    if arguments.step in ("rates", "both"):
        _time_graphs(arguments, record)
    rows = []
    times = record.section(arguments.checkpoint, "ms an image")
    for name, found in record.section(arguments.checkpoint, "graphs").items():
        top = found.get("top-1", "")
        rows.append((name, found["agreement"], found["kl"], top, *(times[isa].get(name, "") for isa in times)))
    print(table(("graph", "agreement", "KL", "top-1", *(f"ms, {isa}" for isa in times)), rows))


def _make_graphs(arguments: argparse.Namespace, record: Record) -> None:
    checkpoint = load_checkpoint(arguments.checkpoint)
    calibrated, tested, labels = _pictures(arguments, checkpoint.preprocess)
    options = TorchOptions(checkpoint.network(), checkpoint, torch.device("cpu"), torch.float32, "off", (1,))
    whole = trace(options, BatchRequest()).model
    expected = graph_logits(whole, "float32", tested, _STREAMS)
    arguments.work.mkdir(parents=True, exist_ok=True)

    def keep(name: str, model: openvino.Model, dtype: str, products: dict[str, int]) -> None:
        file = f"{name.replace(' ', '-')}.xml"
        openvino_package().save_model(model, arguments.work / file, compress_to_fp16=False)
        logits = graph_logits(model, dtype, tested, _STREAMS)
        found = compare(logits, expected)
        row: dict[str, object] = {"file": file, "dtype": dtype, "products": products}
        row |= {"agreement": round(found.agreement, 4), "kl": round(max(found.kl, 0), 6)}
        row |= {"pictures": len(tested), "calibrated_on": len(calibrated)}
        if labels is not None:
            row["top-1"] = round(float((logits.argmax(1) == labels).mean()), 4)
        record.section(arguments.checkpoint, "graphs")[name] = row
        record.save()

    keep("float32", whole, "float32", {})
    if arguments.dtype == "bfloat16":
        keep("bfloat16", whole, "bfloat16", {})
    quantiser = Quantiser(whole, arguments.dtype, calibrated, threads=_STREAMS, progress=print)
    for least in _LEAST:
        quantised = quantiser.quantise(least)
        counts = Counter(each.way.name.lower() for each in quantised.values())
        name = f"int8, made for {least:.1%}" if least else "int8, all static"
        keep(name, int8_graph(whole, quantised), arguments.dtype, dict(counts))


def _pictures(
    arguments: argparse.Namespace, config: PreprocessConfig
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64] | None]:
    """Return pictures to calibrate on, others to measure with, and their classes where these are known."""
    if is_cifar10(arguments.data):
        train, test = cifar10.read_train(arguments.data), cifar10.read_test(arguments.data)
        pixels = [
            np.ascontiguousarray(np.asarray(each).transpose(0, 2, 3, 1))
            for each in (train.pixels[:CALIBRATED], test.pixels)
        ]
        return pixels[0], pixels[1], np.asarray(test.labels)
    first, second = split_pictures(arguments.data)
    labels = None
    if arguments.labels is not None:
        with arguments.labels.open(newline="") as file:
            classes = {row["file"]: int(row["class_index"]) for row in csv.DictReader(file)}
        second = [path for path in second if path.name in classes]
    tested = views_of(second, arguments.tested, config)
    if arguments.labels is not None:
        labels = np.repeat([classes[path.name] for path in second], len(tested) // len(second))
    return views_of(first, CALIBRATED, config), tested, labels


def _time_graphs(arguments: argparse.Namespace, record: Record) -> None:
    runs = {}
    for name, found in record.section(arguments.checkpoint, "graphs").items():
        dtype = "float32" if arguments.dtype == "float32" else found["dtype"]
        if name == "bfloat16" and dtype == "float32":
            continue
        model = core().read_model(arguments.work / found["file"])
        shape = (_BATCH, *(each.get_length() for each in list(model.inputs[0].partial_shape)[1:]))
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        try:
            runs[name] = Requests(model, dtype, threads=_STREAMS, streams=_STREAMS, size=_BATCH), images
        except RuntimeError as error:
            print(f"{name}: does not run: {str(error).strip().splitlines()[-1]}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(arguments.rounds + 1):
        for name, (requests, images) in runs.items():
            started = time.perf_counter()
            for _ in range(arguments.batches):
                requests.run_all(images)
            if turn:  # the first one fills caches
                times[name].append(time.perf_counter() - started)
    count = arguments.batches * _STREAMS * _BATCH
    record.section(arguments.checkpoint, "ms an image")[os.environ.get("ONEDNN_MAX_CPU_ISA", "native")] = {
        name: round(1000 * statistics.median(seconds) / count, 3) for name, seconds in times.items()
    }
    record.save()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.int8", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default="bundled")
    parser.add_argument("--data", type=Path, required=True, help="folder of pictures, or CIFAR-10's")
    parser.add_argument("--labels", type=Path, help="CSV with the columns file and class_index, of these pictures")
    parser.add_argument("--tested", type=int, default=TESTED, help="views to measure the agreement on")
    parser.add_argument("--step", choices=("graphs", "rates", "both"), default="both")
    parser.add_argument("--work", type=Path, default=Path("runs/int8"), help="where the graphs are written")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="beside int8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=4, help="of each stream, in a round")
    parser.add_argument("--record", type=Path, default=RESULTS / "int8.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
