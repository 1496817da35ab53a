"""Int8 beside float32 and bfloat16, how fast and how alike: `python -m benchmarks.int8 CHECKPOINT --data photos/`.

It goes in two steps, so that only the second needs a machine that does nothing else. `--step graphs` quantises the
checkpoint (minutes), writes graphs with ever more inputs in floating point to `--work`, and records how often each has
float32's best class on pictures that it was not calibrated on. `--step rates` times them in turns, in batches of 8 on
two streams, and needs the graphs. `ONEDNN_MAX_CPU_ISA=AVX2` in the environment stands for a CPU without bfloat16.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.record import RESULTS, Record, table
from model.checkpoint import load_checkpoint
from model.evaluation.evaluation_set import open_evaluation_set
from model.images.preprocess import preprocess
from model.runtime.batches import BatchRequest
from model.runtime.openvino.graph import Requests, core, openvino_package
from model.runtime.openvino.quantization import (
    by_cost,
    compare,
    graph_logits,
    logits_alone,
    scaled,
    scaled_inputs,
    without_all_scales,
    without_scales,
)
from model.runtime.openvino.tracing import trace
from model.runtime.torch_backend import TorchOptions
from service.cli.quantised import CALIBRATED, TESTED, split_pictures, views_of

if TYPE_CHECKING:
    import openvino

_SHARES: Final = (0.0, 0.1, 0.25, 0.5)
"""Of the inputs of products, those that have no scale; the costly ones first."""

_SOLE: Final = 48
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
    for name, found in record.section(arguments.checkpoint, "graphs").items():
        times = record.section(arguments.checkpoint, "ms an image")
        rows.append((name, found["agreement"], found["kl"], *(times[isa].get(name, "") for isa in times)))
    isas = record.section(arguments.checkpoint, "ms an image")
    print(table(("graph", "agreement", "KL", *(f"ms, {isa}" for isa in isas)), rows))


def _make_graphs(arguments: argparse.Namespace, record: Record) -> None:
    checkpoint = load_checkpoint(arguments.checkpoint)
    halves = split_pictures(arguments.data)
    calibrated, tested = (
        views_of(files, count, checkpoint.preprocess) for files, count in zip(halves, (CALIBRATED, TESTED), strict=True)
    )
    options = TorchOptions(checkpoint.network(), checkpoint, torch.device("cpu"), torch.float32, "off", (1,))
    whole = trace(options, BatchRequest())[0].model
    logits = logits_alone(whole)
    graph = scaled(logits, calibrated, print)
    inputs = scaled_inputs(graph)
    reference = graph_logits(logits, "float32", calibrated[:_SOLE], _STREAMS)

    def cost(kept: Any) -> float:
        part = without_scales(graph, inputs.keys() - set(kept))
        return compare(graph_logits(part, arguments.dtype, calibrated[:_SOLE], _STREAMS), reference).kl

    order = by_cost(inputs, cost, max(cost(()), 1e-6), print)
    graphs = {"float32": whole, "bfloat16": whole}
    for share in _SHARES:
        count = round(share * len(order))
        graphs[f"int8, {count} of {len(order)} inputs without a scale"] = without_scales(graph, order[:count])
    graphs["int8, no scales, finer weights"] = without_all_scales(logits)
    labelled = _labelled(arguments, checkpoint.preprocess, halves[1])
    arguments.work.mkdir(parents=True, exist_ok=True)
    section = record.section(arguments.checkpoint, "graphs")
    expected, truth = graph_logits(whole, "float32", tested, _STREAMS), {}
    if labelled is not None:
        truth["float32"] = graph_logits(whole, "float32", labelled[0], _STREAMS)
    for number, (name, model) in enumerate(graphs.items()):
        file = f"{number}.xml"
        openvino_package().save_model(model, arguments.work / file, compress_to_fp16=False)
        dtype = name if number < 2 else arguments.dtype
        found = compare(graph_logits(model, dtype, tested, _STREAMS), expected)
        section[name] = {
            "file": file,
            "dtype": dtype,
            "agreement": round(found.agreement, 4),
            "kl": round(max(found.kl, 0), 6),
            "pictures": len(tested),
        }
        if labelled is not None:
            ours = graph_logits(model, dtype, labelled[0], _STREAMS)
            section[name] |= {
                "labelled": len(ours),
                "top-1": float((ours.argmax(1) == labelled[1]).mean()),
                "agreement on labelled": compare(ours, truth["float32"]).agreement,
            }
        record.save()


def _labelled(
    arguments: argparse.Namespace, config: Any, tested: list[Path]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
    """Return labelled pictures that nothing was calibrated on, and their classes."""
    if arguments.labels is not None:
        with arguments.labels.open(newline="") as file:
            classes = {row["file"]: int(row["class_index"]) for row in csv.DictReader(file)}
        known = [path for path in tested if path.name in classes]
        views = views_of(known, 20 * len(known), config)
        each = len(views) // len(known)
        return views, np.repeat([classes[path.name] for path in known], each)
    if arguments.test_set is None:
        return None
    pictures = open_evaluation_set(arguments.test_set)
    return np.stack([preprocess(pictures.upload(n), config) for n in range(len(pictures))]), pictures.labels


def _time_graphs(arguments: argparse.Namespace, record: Record) -> None:
    section = record.section(arguments.checkpoint, "graphs")
    runs: dict[str, Callable[[], None]] = {}
    for name, found in section.items():
        model: openvino.Model = core().read_model(arguments.work / found["file"])
        dtype = "float32" if arguments.dtype == "float32" else found["dtype"]
        if name == "bfloat16" and dtype == "float32":
            continue
        requests = Requests(model, dtype, threads=_STREAMS, streams=_STREAMS, size=_BATCH)
        shape = _shape(model)
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        runs[name] = lambda requests=requests, images=images: requests.run_all(images)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(arguments.rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            for _ in range(arguments.batches):
                run()
            if turn:  # the first one fills caches
                times[name].append(time.perf_counter() - started)
    images = arguments.batches * _STREAMS * _BATCH
    record.section(arguments.checkpoint, "ms an image")[os.environ.get("ONEDNN_MAX_CPU_ISA", "native")] = {
        name: round(1000 * statistics.median(seconds) / images, 3) for name, seconds in times.items()
    }
    record.save()


def _shape(model: openvino.Model) -> tuple[int, ...]:
    return (_BATCH, *(each.get_length() for each in list(model.inputs[0].partial_shape)[1:]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.int8", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default="bundled")
    parser.add_argument("--data", type=Path, required=True, help="folder of pictures")
    parser.add_argument("--labels", type=Path, help="CSV with the columns file and class_index, of these pictures")
    parser.add_argument("--test-set", type=Path, help="labelled pictures besides, as `vitserve evaluate --data`")
    parser.add_argument("--step", choices=("graphs", "rates", "both"), default="both")
    parser.add_argument("--work", type=Path, default=Path("runs/int8"), help="where the graphs are written")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="beside int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2, help="of each stream, in a round")
    parser.add_argument("--record", type=Path, default=RESULTS / "int8.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
