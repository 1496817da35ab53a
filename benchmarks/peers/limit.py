"""What a server in C++ could reach: decoding, resizing and computing with OpenCV and OpenVINO, in one process, no HTTP.

    python -m benchmarks.peers.limit MODEL_FOLDER PICTURE... --seconds 4

Threads decode batches with `cv2.imdecode`, resize them and hand them to an `AsyncInferQueue` of vitserve's graph.
Prints one JSON object: the pictures a second of the fastest of several batch sizes, with the top-1 of each picture.
OpenCV's resizing has other pixels than Pillow's, so a class may differ; a real server has HTTP and answers besides.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import openvino
from numpy.typing import NDArray
from PIL import Image

from benchmarks.peers.common import GRAPH, Pixels

_BATCHES = (1, 4, 8)
_CORES = 2


class Limit:
    """Pictures, how they are prepared, and the compiled graph."""

    def __init__(self, folder: Path, files: list[bytes], dtype: str) -> None:
        config = json.loads((folder / "preprocessor_config.json").read_text())
        self._size: dict[str, int] = config["size"]
        self._crop = int(config["crop_size"]["height"]) if config["do_center_crop"] else 0
        self._files = files
        options = {
            "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[dtype],
            "INFERENCE_NUM_THREADS": _CORES,
            "NUM_STREAMS": _CORES,
            "ENABLE_CPU_PINNING": False,
        }
        self._compiled = openvino.Core().compile_model(folder / GRAPH, "CPU", options)

    def decode(self, data: bytes) -> Pixels:
        """One picture, of the size of the graph's input."""
        picture = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), self._flag(data)), cv2.COLOR_BGR2RGB)
        height, width = picture.shape[:2]
        if "shortest_edge" in self._size:
            scale = self._size["shortest_edge"] / min(width, height)
            size = (int(width * scale), int(height * scale))
        else:
            size = (self._size["width"], self._size["height"])
        picture = cv2.resize(picture, size, interpolation=cv2.INTER_AREA)
        if self._crop:
            left, top = (size[0] - self._crop) // 2, (size[1] - self._crop) // 2
            picture = picture[top : top + self._crop, left : left + self._crop]
        result: Pixels = picture.astype(np.uint8, copy=False)
        return result

    def _flag(self, data: bytes) -> int:
        """How much smaller libjpeg decodes: as vitserve has it, to at least twice the size that is needed."""
        with Image.open(io.BytesIO(data)) as picture:
            room = min(picture.size) / (2 * min(self._size.values()))
        scales = {8: cv2.IMREAD_REDUCED_COLOR_8, 4: cv2.IMREAD_REDUCED_COLOR_4, 2: cv2.IMREAD_REDUCED_COLOR_2}
        return next((int(flag) for scale, flag in scales.items() if room >= scale), int(cv2.IMREAD_COLOR))

    def top1(self) -> list[int]:
        """The best class of each picture."""
        request = self._compiled.create_infer_request()
        batches = (np.stack([self.decode(file)]) for file in self._files)
        logits: list[NDArray[np.float32]] = [next(iter(request.infer([batch]).values())) for batch in batches]
        return [int(rows[0].argmax()) for rows in logits]

    def rate(self, batch: int, seconds: float) -> float:
        """Pictures a second; the first part of the time warms up and is not counted."""
        done = 0
        lock, turn = threading.Lock(), itertools.cycle(self._files)
        jobs = openvino.AsyncInferQueue(self._compiled, 2 * _CORES)

        def count(request: openvino.InferRequest, _: object) -> None:
            nonlocal done
            request.get_output_tensor(0).data.argmax(-1)
            with lock:
                done += batch

        jobs.set_callback(count)
        begin = time.perf_counter()

        def feed() -> None:
            while time.perf_counter() < begin + 1.25 * seconds:
                with lock:
                    files = list(itertools.islice(turn, batch))
                pictures = np.stack([self.decode(file) for file in files])
                with starting:
                    jobs.start_async([pictures])

        starting = threading.Lock()
        threads = [threading.Thread(target=feed) for _ in range(_CORES)]
        for thread in threads:
            thread.start()
        time.sleep(0.25 * seconds)
        with lock:
            before, started = done, time.perf_counter()
        time.sleep(seconds)
        with lock:
            found = (done - before) / (time.perf_counter() - started)
        for thread in threads:
            thread.join()
        jobs.wait_all()
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.limit")
    parser.add_argument("folder", type=Path)
    parser.add_argument("pictures", nargs="+", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=4)
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    limit = Limit(arguments.folder, [file.read_bytes() for file in arguments.pictures], arguments.dtype)
    top1 = limit.top1()
    rates = {batch: round(limit.rate(batch, arguments.seconds / len(_BATCHES)), 1) for batch in _BATCHES}
    print(json.dumps({"rate": max(rates.values()), "by_batch": rates, "top1": top1}), flush=True)
    os._exit(0)  # OpenVINO's threads, freed at the interpreter's end, may wait for it for ever


if __name__ == "__main__":
    main()
