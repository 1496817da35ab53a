"""What every peer shares: decoding with Pillow, and transformers' ViT in bfloat16.

The servers differ in how they bring pictures to this model, not in the model.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Options:
    """A peer's configuration, from the environment: the benchmark tunes it.

    Attributes:
        model: folder in transformers' layout.
        threads: torch's threads for one forward pass.
        decoders: threads or processes that decode, where the peer has room for them.
        batch: largest batch.
        wait_ms: how long an incomplete batch waits.
        dtype: of the network.
        compile: whether the module goes through torch.compile.
    """

    model: Path
    port: int
    threads: int
    decoders: int
    batch: int
    wait_ms: float
    dtype: str
    compile: bool

    @classmethod
    def from_environment(cls) -> Options:
        """Read `PEER_MODEL`, `PEER_PORT` and the rest, which the benchmark sets."""
        env = os.environ
        return cls(
            Path(env["PEER_MODEL"]),
            int(env["PEER_PORT"]),
            int(env.get("PEER_THREADS", "2")),
            int(env.get("PEER_DECODERS", "2")),
            int(env.get("PEER_BATCH", "32")),
            float(env.get("PEER_WAIT_MS", "5")),
            env.get("PEER_DTYPE", "bfloat16"),
            env.get("PEER_COMPILE", "0") == "1",
        )


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


class Classifier:
    """uint8 pictures in, top-1 out. One thread at a time."""

    def __init__(self, options: Options) -> None:
        import torch  # noqa: PLC0415  decoding processes need none

        # ViT needs no torchvision, whose operators may be built for another torch: transformers goes without.
        sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
        from transformers import ViTForImageClassification  # noqa: PLC0415

        self._torch = torch
        torch.set_num_threads(options.threads)
        self._dtype = getattr(torch, options.dtype)
        model = ViTForImageClassification.from_pretrained(
            options.model, dtype=self._dtype, attn_implementation="sdpa"
        ).eval()
        self._model = torch.compile(model, dynamic=True) if options.compile else model
        config = json.loads((options.model / "preprocessor_config.json").read_text())
        mean, std = torch.tensor(config["image_mean"]), torch.tensor(config["image_std"])
        self._scale = (1 / (255 * std)).reshape(1, 3, 1, 1)
        self._shift = (-mean / std).reshape(1, 3, 1, 1)
        size = int(model.config.image_size)
        for count in (1, 2, options.batch):
            self([np.zeros((size, size, 3), np.uint8)] * count)

    def probabilities(self, pictures: Sequence[Pixels]) -> NDArray[np.float32]:
        """Softmax over the classes: float32 [B, K]."""
        torch = self._torch
        with torch.inference_mode():
            pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float()
            logits = self._model(pixel_values=(pixels * self._scale + self._shift).to(self._dtype)).logits
            result: NDArray[np.float32] = logits.float().softmax(-1).numpy()
            return result

    def __call__(self, pictures: Sequence[Pixels]) -> list[dict[str, float]]:
        """The best class of each picture: `{"index": ..., "score": ...}`."""
        return [
            {"index": int(row.argmax()), "score": round(float(row.max()), 6)} for row in self.probabilities(pictures)
        ]
