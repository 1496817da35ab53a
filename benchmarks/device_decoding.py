"""Decoding on the device: `python -m benchmarks.device_decoding FOLDER`. Its rate, and how its pixels differ.

Pictures of the folder that `VIT_DECODE=device` gives to the device are decoded and resized there, and by the CPU as a
service does it, and as it does with `VIT_SCALED_DECODE=false`. The pixels are compared, and the model's best classes.
On a CPU the same library's decoder for CPUs stands in, or Pillow where it is not installed: what is measured there is
the resize, and the script.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from model.prediction import RequestedOutputs

if __name__ == "__main__":  # as a script, only its own folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.checkpoint import load_checkpoint
from model.config import PreprocessConfig
from model.errors import DeviceError
from model.images.device_jpeg import device_picture
from model.images.preprocess import preprocess
from model.prediction import EncodedPicture
from model.runtime.cuda.nvimgcodec import NvImageCodec
from model.runtime.cuda.picture_decoding import DevicePreprocess, PictureDecoder
from model.runtime.device import choose_device
from model.runtime.predictor import Predictor
from service.settings import Settings

Top1 = Callable[[NDArray[np.uint8]], NDArray[np.int64]]
"""uint8 [N, H, W, C] -> the best class of each."""


class _Pillow:
    """Stands in for a device's decoder on the CPU."""

    name = "Pillow, standing in"

    def decode(self, files: Sequence[bytes]) -> list[Tensor | None]:
        pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        return [torch.from_numpy(np.array(picture)) for picture in pictures]


def decoder_for(device: torch.device) -> PictureDecoder:
    """Return the library's decoder; raises `DeviceError` where a GPU has none."""
    try:
        return NvImageCodec(device)
    except DeviceError:
        if device.type == "cuda":
            raise
        return _Pillow()


def measure(
    files: Sequence[bytes], config: PreprocessConfig, device: torch.device, top1: Top1, *, batch: int, seconds: float
) -> dict[str, Any]:
    """Decode the files on a device and compare.

    Args:
        batch: most pictures in one call of the decoder.
        seconds: that the rate is measured for.

    Raises:
        DeviceError: this device does not decode, or not for this preprocessing.
        ValueError: none of the files goes to a device.
    """
    subject = DevicePreprocess(decoder_for(device), config)
    largest = Settings.model_fields["max_image_pixels"].default
    found = [(data, device_picture(data, config, max_pixels=largest)) for data in files]
    suited = [(data, picture.encoded) for data, picture in found if picture is not None]
    if not suited:
        raise ValueError(f"none of {len(files)} pictures is one that a device decodes")
    encoded = [picture for _, picture in suited]
    pixels, failed = _decoded(subject, encoded, config, device, batch)
    kept = [place for place in range(len(suited)) if place not in failed]
    record: dict[str, Any] = {
        "decoder": subject.decoder.name,
        "pictures": len(files),
        "unsuited": len(files) - len(suited),
        "failed": len(failed),
        "images_per_second": round(_rate(subject, encoded, config, device, batch, seconds), 1),
    }
    classes = top1(pixels[kept])
    for name, scaled in (("service", True), ("full_size", False)):
        cpu = np.stack([preprocess(suited[place][0], config, scaled_decode=scaled) for place in kept])
        difference = np.abs(pixels[kept].astype(np.int16) - cpu)
        record[f"from_cpu_{name}"] = {
            "largest_levels": int(difference.max()),
            "mean_levels": round(float(difference.mean()), 5),
            "mean_levels_of_worst": round(float(difference.mean(axis=(1, 2, 3)).max()), 5),
            "equal_top1": round(float((classes == top1(cpu)).mean()), 4),
        }
    return record


def _decoded(
    subject: DevicePreprocess,
    encoded: Sequence[EncodedPicture],
    config: PreprocessConfig,
    device: torch.device,
    batch: int,
) -> tuple[NDArray[np.uint8], set[int]]:
    out = torch.zeros((len(encoded), *config.size, 3), dtype=torch.uint8, device=device)
    failed: set[int] = set()
    for start in range(0, len(encoded), batch):
        failed |= subject.fill({start + row: each for row, each in enumerate(encoded[start : start + batch])}, out)
    return out.cpu().numpy(), failed


def _rate(
    subject: DevicePreprocess,
    encoded: Sequence[EncodedPicture],
    config: PreprocessConfig,
    device: torch.device,
    batch: int,
    seconds: float,
) -> float:
    """Pictures per second of one thread that decodes and resizes batch after batch."""
    out = torch.zeros((batch, *config.size, 3), dtype=torch.uint8, device=device)
    pictures = itertools.cycle(encoded)

    def one_batch() -> None:
        subject.fill(dict(enumerate(itertools.islice(pictures, batch))), out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    one_batch()
    done, started = 0, time.perf_counter()
    while (now := time.perf_counter()) < started + seconds or not done:
        one_batch()
        done += batch
    return done / (max(now, time.perf_counter()) - started)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. 0: measured; 2: refused, with one line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_decoding", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", default="bundled")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4)
    arguments = parser.parse_args(argv)
    try:
        device = choose_device(arguments.device)
        checkpoint = load_checkpoint(arguments.checkpoint)
        predictor = Predictor(checkpoint, device=str(device), compile_mode="off", backend="torch")
        step = predictor.max_batch

        def top1(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
            parts = [pixels[start : start + step] for start in range(0, len(pixels), step)]
            answers = (answer for part in parts for answer in predictor.predict(part, RequestedOutputs(1)))
            return np.array([answer.indices[0] for answer in answers])

        files = [path.read_bytes() for path in sorted(arguments.folder.iterdir()) if path.is_file()]
        preprocessing, batch, seconds = checkpoint.preprocess, arguments.batch, arguments.seconds
        found = measure(files, preprocessing, device, top1, batch=batch, seconds=seconds)
    except (DeviceError, ValueError) as error:
        print(f"benchmarks/device_decoding.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
