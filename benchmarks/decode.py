"""Scaled decoding against full decoding, and the compiled resize against Pillow's: time per file, and the answers.

    python -m benchmarks.decode [--rounds 9] [--out benchmarks/results] [--only resize]

One thread. Each round decodes every file of a class both ways in turn, so that whatever else the machine does falls
on both. A class's speed-up is the median over its files of (median full) / (median scaled), in the thread's CPU time
and in wall time. Photographs come from the folder that VIT_SHARED names, else synthetic ones take their place.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image, features

from benchmarks import pictures
from benchmarks.checkpoints import shared_folder
from model.checkpoint import load_checkpoint
from model.config import PreprocessConfig
from model.images import resample
from model.images.decode import decode
from model.images.preprocess import min_decoded_size, preprocess
from model.images.resample import Axis, passes_rows_first
from model.runtime.predictor import Predictor

CONFIGS = {
    "32": PreprocessConfig(
        size=(32, 32),
        resize="shortest_edge",
        resize_size=(32, 32),
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
    "224": PreprocessConfig(
        size=(224, 224),
        resize="shortest_edge",
        resize_size=(248, 248),
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
}
"""Preprocessing of the bundled model and of DeiT-Tiny, by pixels of a side."""

PHONE_PIXELS = (12_000_000, 24_200_000)


@dataclass(frozen=True)
class File:
    """One upload."""

    name: str
    data: bytes


def main() -> int:
    """Measure, print two tables, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="times that each file is decoded each way")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the record")
    parser.add_argument("--only", choices=["resize"], help="leave the rest of the record as it is")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "decode.json"
    resizes = [measure_resize(*target, arguments.rounds) for target in RESIZES]
    if arguments.only:
        record = json.loads(path.read_text()) if path.exists() else {}
        record["resize"] = {"when": now(), "device": device(), "pillow": PIL.__version__, "rows": resizes}
        path.write_text(json.dumps(record, indent=1) + "\n")
        print_resizes(resizes)
        return 0

    classes, source = file_classes()
    speeds = [measure(name, files, side, arguments.rounds) for name, files in classes.items() for side in CONFIGS]
    answers = [compare_answers(name, checkpoint) for name, checkpoint in checkpoints().items()]

    record = {
        "benchmark": "decode",
        "when": now(),
        "command": " ".join(["python -m benchmarks.decode", *sys.argv[1:]]),
        "device": device(),
        "versions": {
            "python": platform.python_version(),
            "pillow": PIL.__version__,
            "libjpeg-turbo": features.version("libjpeg_turbo"),
            "numpy": np.__version__,
            "torch": torch.__version__,
        },
        "load_average": os.getloadavg()[0],
        "pictures": source,
        "speed": speeds,
        "answers": answers,
        "resize": {"when": now(), "device": device(), "pillow": PIL.__version__, "rows": resizes},
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{device()}; Pillow {PIL.__version__}; {source}; medians of {arguments.rounds} rounds, one thread\n")
    print_tables(speeds, answers)
    print_resizes(resizes)
    print(f"\nwritten to {path}")
    return 0


# --- files ----------------------------------------------------------------------------------------------------------


def file_classes() -> tuple[dict[str, list[File]], str]:
    """The classes of files, and where they come from."""
    small, source = pictures.ensure()
    folder = shared_folder() / "data" / "photos"
    photos = [File(path.name, path.read_bytes()) for path in sorted(folder.glob("*.jpg"))]
    photos = [file for file in photos if PHONE_PIXELS[0] <= pixels(file.data) <= PHONE_PIXELS[1]]
    if photos:
        source += f"; {len(photos)} photographs of 12 to 24 Mpx, each also stored again the other way"
    else:
        photos = [File(f"synthetic-{seed}", synthetic_photo(seed)) for seed in range(2)]
        source += f"; {len(photos)} synthetic pictures of 12.2 Mpx"
    return {
        "500x375": [File(path.name, path.read_bytes()) for path in small],
        "12-24 Mpx baseline": [File(file.name, stored(file.data, progressive=False)) for file in photos],
        "12-24 Mpx progressive": [File(file.name, stored(file.data, progressive=True)) for file in photos],
    }, source


def pixels(data: bytes) -> int:
    """Of a file, as stored."""
    with Image.open(io.BytesIO(data)) as image:
        return image.width * image.height


def stored(data: bytes, *, progressive: bool) -> bytes:
    """A JPEG as it is, or with the same tables and orientation in the other order of scans."""
    with Image.open(io.BytesIO(data)) as image:
        if bool(image.info.get("progressive")) == progressive:
            return data
        file = io.BytesIO()
        image.save(file, "JPEG", quality="keep", progressive=progressive, exif=image.info.get("exif", b""))
        return file.getvalue()


def synthetic_photo(seed: int) -> bytes:
    """4032 x 3024 pixels of noise in octaves, as coarse structure outweighs fine in photographs; about 3 MB."""
    random = np.random.default_rng(seed)
    size = (4032, 3024)
    total = np.zeros((size[1], size[0], 3), np.float32)
    for octave in range(9):
        shape = (max(1, size[1] >> octave), max(1, size[0] >> octave), 3)
        layer = Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).resize(size, Image.Resampling.BILINEAR)
        total += (np.asarray(layer, np.float32) - 128) * 2.0 ** ((octave - 8) / 1.5)
    image = Image.fromarray((total * 0.6 + 128).clip(0, 255).astype(np.uint8))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


# --- speed ----------------------------------------------------------------------------------------------------------


def measure(name: str, files: list[File], side: str, rounds: int) -> dict[str, Any]:
    """Both ways for each file of a class, in turn."""
    config = CONFIGS[side]
    took: dict[tuple[str, bool, str], list[float]] = {}
    for number in range(rounds + 1):
        for file in files:
            for scaled in (True, False) if number % 2 else (False, True):
                wall, cpu = time.perf_counter(), time.thread_time()
                preprocess(file.data, config, scaled_decode=scaled)
                cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
                if number:  # the first warms up
                    took.setdefault((file.name, scaled, "cpu"), []).append(1e3 * cpu)
                    took.setdefault((file.name, scaled, "wall"), []).append(1e3 * wall)
    each: list[dict[str, Any]] = []
    for file in files:
        row: dict[str, Any] = {"file": file.name, "bytes": len(file.data), "scale": scale_of(file.data, config)}
        for clock in ("cpu", "wall"):
            full, scaled_ms = (statistics.median(took[file.name, scaled, clock]) for scaled in (False, True))
            row[f"full_{clock}_ms"], row[f"scaled_{clock}_ms"] = round(full, 3), round(scaled_ms, 3)
            row[f"{clock}_speedup"] = round(full / scaled_ms, 2)
        each.append(row)
    medians = {
        key: round(statistics.median(row[key] for row in each), 3) for key in each[0] if key.endswith(("ms", "up"))
    }
    return {"class": name, "side": int(side), "rounds": rounds, **medians, "files": each}


def scale_of(data: bytes, config: PreprocessConfig) -> int:
    """1, 2, 4 or 8: what `preprocess` decodes a file at."""
    return decode(data, max_pixels=10**9, min_size=min_decoded_size(config)).scale


# --- resize ---------------------------------------------------------------------------------------------------------

RESIZES = [((341, 256), (341, 256)), ((341, 256), (224, 224)), ((42, 32), (42, 32)), ((42, 32), (32, 32))]
"""(width, height) that 500 x 375 pixels are resized to, bicubic, and of the centre that is wanted."""


def measure_resize(size: tuple[int, int], crop: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Both ways for a picture in memory, in turn; Pillow resizes the part alone, as `preprocess` would have it do."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8))
    bicubic = Image.Resampling.BICUBIC
    first = [(size[axis] - crop[axis]) // 2 for axis in (0, 1)]
    columns, rows = (Axis(0, picture.size[axis], size[axis], first[axis], crop[axis]) for axis in (0, 1))
    across, down = picture.width / size[0], picture.height / size[1]
    box = (first[0] * across, first[1] * down, (first[0] + crop[0]) * across, (first[1] + crop[1]) * down)

    def kernel(*, cached: bool = True) -> NDArray[np.uint8] | None:
        if not cached:
            resample._pass.cache_clear()
        rows_first = passes_rows_first(picture.size, size)
        return resample.resample_part(picture, columns, rows, bicubic, rows_first=rows_first)

    pixels = kernel()
    if pixels is None:
        raise SystemExit("the compiled kernel is not installed, or this processor has no AVX2")
    whole = picture.resize(size, bicubic).crop((first[0], first[1], first[0] + crop[0], first[1] + crop[1]))
    ways: dict[str, Callable[[], object]] = {
        "pillow": lambda: np.array(picture.resize(crop, bicubic, box)),
        "kernel": kernel,
        "kernel_new_size": partial(kernel, cached=False),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(10 * rounds):
        for name, way in ways.items():
            start = time.thread_time()
            for _ in range(5):
                way()
            took[name].append(200 * (time.thread_time() - start))
    medians = {f"{name}_cpu_ms": round(statistics.median(each), 3) for name, each in took.items()}
    ratio = statistics.median(a / b for a, b in zip(took["pillow"], took["kernel"], strict=True))
    new = statistics.median(a / b for a, b in zip(took["pillow"], took["kernel_new_size"], strict=True))
    return {
        "resized": size,
        "crop": crop,
        "rounds": 10 * rounds,
        **medians,
        "ratio": round(ratio, 2),
        "ratio_new_size": round(new, 2),
        "bit_for_bit": pixels.tobytes() == whole.tobytes(),
    }


def print_resizes(rows: list[dict[str, Any]]) -> None:
    """Markdown."""
    print("\n| 500 x 375 to | crop | Pillow, CPU ms | kernel | ratio | kernel, size not seen before | ratio | equal |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['resized']} | {row['crop']} | {row['pillow_cpu_ms']} | {row['kernel_cpu_ms']} | {row['ratio']} "
            f"| {row['kernel_new_size_cpu_ms']} | {row['ratio_new_size']} | {row['bit_for_bit']} |"
        )


# --- answers --------------------------------------------------------------------------------------------------------


def checkpoints() -> dict[str, str]:
    """Models whose answers are compared: name to source."""
    found = {"bundled": "bundled"}
    deit = shared_folder() / "weights" / "deit_tiny_imagenet"
    if deit.is_dir():
        found["deit_tiny_imagenet"] = str(deit)
    return found


def compare_answers(name: str, source: str) -> dict[str, Any]:
    """Scores of all shared photographs (else of the speed classes' files), scaled against full, in float32."""
    checkpoint = load_checkpoint(source)
    predictor = Predictor(checkpoint, device="cpu", backend="torch", dtype="float32", compile_mode="off", threads=1)
    files = shared_photographs() or [file for files in file_classes()[0].values() for file in files]
    pairs = [
        [preprocess(file.data, checkpoint.preprocess, scaled_decode=scaled) for file in files]
        for scaled in (False, True)
    ]
    full, scaled = (scores(predictor, pixels) for pixels in pairs)
    apart = np.abs(full - scaled).max(axis=1)
    changed = np.flatnonzero(full.argmax(axis=1) != scaled.argmax(axis=1))
    return {
        "model": name,
        "files": len(files),
        "decoded_at_a_scale": sum(scale_of(file.data, checkpoint.preprocess) > 1 for file in files),
        "same_top1": len(files) - len(changed),
        "largest_score_difference": round(float(apart.max()), 4),
        "largest_score_difference_in": files[int(apart.argmax())].name,
        "median_score_difference": round(float(np.median(apart)), 4),
        "mean_levels_apart": round(
            float(np.mean([np.abs(a.astype(int) - b).mean() for a, b in zip(*pairs, strict=True)])), 3
        ),
        "top1_changed": [
            {"file": files[i].name, "full_top2": np.sort(full[i])[:-3:-1].round(4).tolist()} for i in changed.tolist()
        ],
    }


def shared_photographs() -> list[File]:
    """Every JPEG photograph at hand."""
    folder = shared_folder() / "data"
    paths = sorted(folder.glob("imagenet-samples/*.JPEG")) + sorted(folder.glob("photos/*.jpg"))
    return [File(path.name, path.read_bytes()) for path in paths]


def scores(predictor: Predictor, images: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
    """Softmax scores [N, classes]."""
    parts = [
        torch.softmax(torch.from_numpy(predictor.logits(np.stack(images[first : first + 16]))), dim=-1).numpy()
        for first in range(0, len(images), 16)
    ]
    return np.concatenate(parts)


# --- telling --------------------------------------------------------------------------------------------------------


def now() -> str:
    """The date and time, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def device() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def print_tables(speeds: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    """Markdown."""
    print("| files | to | full, CPU ms | scaled, CPU ms | speed-up, CPU | wall | slowest file's |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in speeds:
        print(
            f"| {row['class']} ({len(row['files'])}) | {row['side']} px | {row['full_cpu_ms']:.2f} "
            f"| {row['scaled_cpu_ms']:.2f} | {row['cpu_speedup']:.2f} | {row['wall_speedup']:.2f} "
            f"| {min(each['cpu_speedup'] for each in row['files']):.2f} |"
        )
    for row in speeds:
        if "Mpx" in row["class"]:
            for each in row["files"]:
                print(
                    f"{row['class']}, {row['side']} px: {each['file']}, {each['bytes'] / 1e6:.1f} MB, "
                    f"1/{each['scale']}: {each['full_cpu_ms']:.1f} / {each['scaled_cpu_ms']:.1f} ms "
                    f"= {each['cpu_speedup']:.2f}"
                )
    print("\n| model | photographs | scaled | same top-1 | largest score difference | median | levels apart, mean |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in answers:
        print(
            f"| {row['model']} | {row['files']} | {row['decoded_at_a_scale']} | {row['same_top1']} "
            f"| {row['largest_score_difference']} | {row['median_score_difference']} | {row['mean_levels_apart']} |"
        )
    for row in answers:
        for each in row["top1_changed"]:
            print(f"{row['model']}: another top-1 for {each['file']}, whose best two had {each['full_top2']}")


if __name__ == "__main__":
    sys.exit(main())
