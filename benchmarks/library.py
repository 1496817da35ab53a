"""What vitserve's backends make of networks that timm's own code runs, beside the same module by hand in torch.

    python -m benchmarks.library [--architectures resnet18 convnext_atto] [--rounds 5] [--dtype float32]

Weights are random. Both get the same uint8 batches, normalise them and give probabilities; rounds are interleaved, and
the printed rates are medians of images a second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the service has it; read when torch loads

import numpy as np
import torch

from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.timm import preprocess_of
from model.network import library
from model.outputs import RequestedOutputs
from model.runtime.device import DTYPES
from model.runtime.predictor import Predictor
from model.runtime.torch_backend import Normalise

_ARCHITECTURES = ("resnet18", "convnext_atto", "swin_tiny_patch4_window7_224", "efficientnet_b0", "mobilevit_xxs")
_BATCHES = (1, 8)


def random_checkpoint(name: str) -> Checkpoint:
    """Return an architecture with timm's initial weights, and the preprocessing of its first released ones."""
    published = library.published(name)
    channels, *size = published["input_size"]
    fixed = bool(published.get("fixed_input_size"))
    torch.manual_seed(0)
    config = library.library_config(name, {}, 1000, channels, (size[0], size[1]), fixed_size=fixed)
    tensors = library.LibraryNetwork(config).module.state_dict()
    return Checkpoint(
        name=name,
        source=name,
        format="timm",
        architecture=name,
        config=config,
        preprocess=preprocess_of(published, name),
        labels=tuple(map(str, range(1000))),
        tensors={key: tensor for key, tensor in tensors.items() if tensor.is_floating_point()},
    )


def rate(compute: Callable[[], Any], images: int, seconds: float) -> float:
    """Return images a second."""
    compute()
    done, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        compute()
        done += images
    return done / (time.perf_counter() - started)


def measure(name: str, dtype: str, threads: int, rounds: int, seconds: float) -> None:
    """Print the rates of one architecture."""
    checkpoint = random_checkpoint(name)
    predictor = Predictor(checkpoint, dtype=dtype, max_batch=max(_BATCHES), threads=threads, streams=1)
    predictor.warm_up()
    model = checkpoint.network().to(device=predictor.device, dtype=DTYPES[dtype])
    normalise = Normalise(checkpoint.preprocess, DTYPES[dtype]).to(predictor.device)
    for count in _BATCHES:
        shape = (count, *checkpoint.config.image_size, checkpoint.config.in_channels)
        images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)

        def by_hand(images: Any = images) -> None:
            with torch.inference_mode():
                module: Any = model.module
                module(normalise(torch.from_numpy(images).to(predictor.device))).float().softmax(-1).cpu()

        def ours(images: Any = images) -> None:
            predictor.predict(images, RequestedOutputs(5))

        pairs = [(rate(ours, count, seconds), rate(by_hand, count, seconds)) for _ in range(rounds)]
        mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(first / second for first, second in pairs)
        print(f"| {name} | {count} | {mine:.1f} | {theirs:.1f} | {ratio:.2f} | {predictor.backend} |", flush=True)


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.library")
    parser.add_argument("--architectures", nargs="+", default=_ARCHITECTURES)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each of the two")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    arguments = parser.parse_args()
    print("| network | batch | vitserve | timm by hand | ratio | backend |\n|---|---|---|---|---|---|")
    for name in arguments.architectures:
        measure(name, arguments.dtype, arguments.threads, arguments.rounds, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
