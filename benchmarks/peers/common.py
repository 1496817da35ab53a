"""What every peer shares: decoding with Pillow, and the engine, which is transformers' ViT or vitserve's graph.

The servers differ in how they bring pictures to the engine, not in the engine.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
_Answers = list[dict[str, float]]

GRAPH = "graph.xml"
"""In a model's folder: vitserve's graph of it, see `benchmarks.peers.graph`."""


@dataclass(frozen=True)
class Options:
    """A peer's configuration, from the environment: the benchmark tunes it.

    Attributes:
        model: folder in transformers' layout.
        threads: of the engine: torch's for one forward pass, or OpenVINO's.
        decoders: threads that decode, where the peer has room for them.
        batch: largest batch.
        wait_ms: how long an incomplete batch waits.
        dtype: of the network.
        engine: `torch`, `compile` (torch.compile) or `openvino`.
        workers: processes with an engine each, where the peer has room for them.
    """

    model: Path
    port: int = 0
    threads: int = 2
    decoders: int = 2
    batch: int = 32
    wait_ms: float = 5
    dtype: str = "bfloat16"
    engine: str = "torch"
    workers: int = 1

    @classmethod
    def from_environment(cls) -> Options:
        """Read `PEER_MODEL`, `PEER_PORT` and the rest, which the benchmark sets."""
        kinds = {"model": Path, "wait_ms": float, "dtype": str, "engine": str}
        given = {each.name: os.environ.get(f"PEER_{each.name.upper()}") for each in fields(cls)}
        return cls(**{name: kinds.get(name, int)(value) for name, value in given.items() if value is not None})


class Decoder:
    """JPEG bytes to the model's uint8 picture [H, W, 3], as transformers' image processor resizes and crops."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "preprocessor_config.json").read_text())
        self._size: dict[str, int] = config["size"]
        self._crop = int(config["crop_size"]["height"]) if config["do_center_crop"] else 0
        self._resample = Image.Resampling(config["resample"])

    def __call__(self, data: bytes) -> Pixels:
        """Decode, resize, crop."""
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        if "shortest_edge" in self._size:
            edge, (width, height) = self._size["shortest_edge"], picture.size
            size = (edge, int(edge * height / width)) if width <= height else (int(edge * width / height), edge)
        else:
            size = (self._size["width"], self._size["height"])
        picture = picture.resize(size, self._resample)
        if self._crop:
            left, top = (picture.width - self._crop) // 2, (picture.height - self._crop) // 2
            picture = picture.crop((left, top, left + self._crop, top + self._crop))
        return np.asarray(picture)

    def many(self, files: Sequence[bytes], pool: ThreadPoolExecutor) -> list[Pixels]:
        """Decode side by side: Pillow releases the interpreter's lock."""
        return list(pool.map(self, files))


class TorchClassifier:
    """uint8 pictures in, top-1 out, by the module of transformers."""

    def __init__(self, options: Options) -> None:
        import torch  # noqa: PLC0415  decoding processes need none

        # ViT needs no torchvision, whose operators may be built for another torch: transformers goes without.
        sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
        from transformers import ViTForImageClassification  # noqa: PLC0415

        self._torch = torch
        torch.set_num_threads(options.threads)
        self._threads = options.threads
        self._dtype = getattr(torch, options.dtype)
        model = ViTForImageClassification.from_pretrained(
            options.model, dtype=self._dtype, attn_implementation="sdpa"
        ).eval()
        self._model = torch.compile(model, dynamic=True) if options.engine == "compile" else model
        config = json.loads((options.model / "preprocessor_config.json").read_text())
        mean, std = torch.tensor(config["image_mean"]), torch.tensor(config["image_std"])
        self._scale = (1 / (255 * std)).reshape(1, 3, 1, 1)
        self._shift = (-mean / std).reshape(1, 3, 1, 1)
        _warm(self, int(model.config.image_size), options.batch)

    def probabilities(self, pictures: Sequence[Pixels]) -> NDArray[np.float32]:
        """Softmax over the classes: float32 [B, K]."""
        torch = self._torch
        # The number of threads is the calling thread's own.
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float()
            logits = self._model(pixel_values=(pixels * self._scale + self._shift).to(self._dtype)).logits
            result: NDArray[np.float32] = logits.float().softmax(-1).numpy()
            return result

    def __call__(self, pictures: Sequence[Pixels]) -> _Answers:
        """The best class of each picture: `{"index": ..., "score": ...}`."""
        return _best(self.probabilities(pictures))


class OpenVinoClassifier:
    """uint8 pictures in, top-1 out, by vitserve's graph."""

    def __init__(self, options: Options) -> None:
        import openvino  # noqa: PLC0415  decoding processes need none

        core = openvino.Core()
        settings = {
            "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[options.dtype],
            "INFERENCE_NUM_THREADS": options.threads,
            "ENABLE_CPU_PINNING": False,
        }
        model = core.read_model(options.model / GRAPH)
        compiled = core.compile_model(model, "CPU", settings)
        self._request = compiled.create_infer_request()
        _warm(self, int(model.inputs[0].partial_shape[1].get_length()), options.batch)

    def __call__(self, pictures: Sequence[Pixels]) -> _Answers:
        """The best class of each picture: `{"index": ..., "score": ...}`."""
        [logits] = self._request.infer([np.stack(pictures)], share_inputs=True, share_outputs=False).values()
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        return _best(odds / odds.sum(-1, keepdims=True))


Classifier = TorchClassifier | OpenVinoClassifier


def classifier_of(options: Options) -> Classifier:
    """The engine that the options name."""
    return OpenVinoClassifier(options) if options.engine == "openvino" else TorchClassifier(options)


def _warm(classifier: Classifier, size: int, batch: int) -> None:
    for count in sorted({1, min(2, batch), batch}):
        classifier([np.zeros((size, size, 3), np.uint8)] * count)


def _best(rows: NDArray[np.float32]) -> _Answers:
    return [{"index": int(row.argmax()), "score": round(float(row.max()), 6)} for row in rows]
