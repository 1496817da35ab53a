"""What the first relevance costs in memory with OpenVINO: `python -m benchmarks.relevance_memory`.

A network of random weights, ViT-B/16 by default, classifies in a process of its own, and then makes its graphs for
relevance. The numbers are the resident memory of that process before and after, and its peak.
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import RESULTS, Record, table
from model.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.network.vit import VisionTransformer
from model.outputs import MapRequest, RequestedOutputs
from model.runtime.batches import BatchRequest
from model.runtime.openvino.backend import OpenVino
from model.runtime.predictor import Predictor

_BATCHES = (1, 8, 4)


def random_checkpoint(width: int, depth: int) -> Checkpoint:
    """Return a ViT of 224 pixels with patches of 16, heads of 64 and 1000 classes."""
    config = ViTConfig(
        image_size=(224, 224),
        patch_size=16,
        width=width,
        depth=depth,
        heads=width // 64,
        mlp_width=4 * width,
        num_classes=1000,
    )
    size, half = config.image_size, (0.5,) * 3
    preprocess = PreprocessConfig(
        size=size, resize="squash", resize_size=size, interpolation="bicubic", mean=half, std=half
    )
    torch.manual_seed(0)
    tensors = {name: tensor.detach() for name, tensor in VisionTransformer(config).state_dict().items()}
    return Checkpoint("random", "random", "vitserve", "vit", config, preprocess, tuple(map(str, range(1000))), tensors)


def memory() -> dict[str, int]:
    """Return the resident memory of this process and its peak so far, in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[field].split()[0]) // 1024 for name, field in (("resident", "VmRSS"), ("peak", "VmHWM"))}


def measure(width: int, depth: int, threads: int) -> dict[str, Any]:
    """Return the memory after classification, after the graphs are made, and after they were used."""
    predictor = Predictor(random_checkpoint(width, depth), device="cpu", threads=threads)
    predictor.warm_up()
    images = np.random.default_rng(0).integers(0, 256, (max(_BATCHES), 224, 224, 3), dtype=np.uint8)
    found: dict[str, Any] = {"dtype": predictor.dtype, "threads": threads, "streams": predictor.streams}
    for name, request in (("classified", None), ("used", MapRequest("relevance"))):
        if request is not None:
            assert isinstance(predictor._backend, OpenVino)
            predictor._backend.prepare(BatchRequest(relevance=True))
            found["made"] = memory()
        for batch in _BATCHES:
            predictor.predict(images[:batch], RequestedOutputs(1, request))
        found[name] = memory()
    return found


def main() -> None:
    """Measure in a child process, record it and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relevance_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path, default=RESULTS / "relevance-memory.json")
    arguments = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(measure, (arguments.width, arguments.depth, arguments.threads))
    record = Record(arguments.record, dtype="auto (bfloat16 where native)", about={"weights": "random"})
    record.section(f"{arguments.width} wide, {arguments.depth} blocks").update(found)
    record.save()
    rows = [(name, found[name]["resident"], found[name]["peak"]) for name in ("classified", "made", "used")]
    print(table(("after", "resident MiB", "peak MiB"), rows))


if __name__ == "__main__":
    main()
