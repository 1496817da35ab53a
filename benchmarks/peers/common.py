"""What every peer shares: decoding with Pillow, and the engine, which is transformers' ViT or
vitserve's graph.

The servers differ in how they bring pictures to the engine, not in the engine.
"""

import io
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic_settings import BaseSettings, SettingsConfigDict

Pixels = NDArray[np.uint8]
# uint8 pictures in; the best class of each out, as `{"index": ..., "score": ...}`.
Classifier = Callable[[Sequence[Pixels]], list[dict[str, float]]]

# In a model's folder: vitserve's graph of it, see `benchmarks.peers.__main__`.
GRAPH = "graph.xml"


class Options(BaseSettings):
    """A peer's configuration, from the environment (`PEER_MODEL`, ...): the benchmark sets it.

    Attributes:
        model: folder in transformers' layout.
        threads: threads of the engine: torch's for one forward pass, or OpenVINO's.
        decoders: decoding threads, if the peer supports them.
        batch: largest batch.
        wait_ms: how long an incomplete batch waits.
        dtype: dtype of the network.
        engine: `torch`, `compile` (torch.compile) or `openvino`.
        workers: engine processes, if the peer supports them.
    """

    model_config = SettingsConfigDict(env_prefix="PEER_")
    model: Path
    port: int = 0
    threads: int = 2
    decoders: int = 2
    batch: int = 32
    wait_ms: float = 5
    dtype: str = "bfloat16"
    engine: str = "torch"
    workers: int = 1


class Decoder:
    """JPEG bytes to the model's uint8 picture [H, W, 3], as transformers' image processor resizes
    and crops.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "preprocessor_config.json").read_text())
        self._edge: int | None = config["size"].get("shortest_edge")
        self._side: int = config["crop_size"]["height"]
        self._resample = Image.Resampling(config["resample"])

    def __call__(self, data: bytes) -> Pixels:
        """Decode, resize, crop."""
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        size = (self._side, self._side)
        if self._edge is not None:
            size = (
                self._edge * picture.width // min(picture.size),
                self._edge * picture.height // min(picture.size),
            )
        picture = picture.resize(size, self._resample)
        left = (picture.width - self._side) // 2
        top = (picture.height - self._side) // 2
        return np.asarray(picture.crop((left, top, left + self._side, top + self._side)))


def probabilities_of(options: Options) -> Callable[[Sequence[Pixels]], NDArray[np.float32]]:
    """Return the engine that the options name, warm: uint8 pictures to the softmax over the
    classes, float32 [B, K].
    """
    config = json.loads((options.model / "preprocessor_config.json").read_text())
    engine = _openvino(options) if options.engine == "openvino" else _torch(options, config)
    for count in sorted({1, min(2, options.batch), options.batch}):
        engine([np.zeros((*config["crop_size"].values(), 3), np.uint8)] * count)
    return engine


def classifier_of(options: Options) -> Classifier:
    """Return the engine that the options name; it gives the best class of each picture."""
    probabilities = probabilities_of(options)
    return lambda pictures: [
        {"index": int(row.argmax()), "score": round(float(row.max()), 6)}
        for row in probabilities(pictures)
    ]


class FileClassifier:
    """JPEGs in, top-1 out, for peers that give batches of files to one function."""

    def __init__(self) -> None:
        options = Options()
        self._decode = Decoder(options.model)
        self._classify = classifier_of(options)
        self._pool = ThreadPoolExecutor(options.decoders)

    def __call__(self, files: Sequence[bytes]) -> list[dict[str, float]]:
        """Decode side by side, as Pillow releases the interpreter's lock, and classify."""
        return self._classify(list(self._pool.map(self._decode, files)))


def _torch(
    options: Options, config: dict[str, Any]
) -> Callable[[Sequence[Pixels]], NDArray[np.float32]]:
    """Return the module of transformers."""
    import torch  # noqa: PLC0415  peers with OpenVINO need none

    # ViT needs no torchvision, whose operators may be built for another torch: transformers goes
    # without.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    from transformers import ViTForImageClassification  # noqa: PLC0415

    dtype = getattr(torch, options.dtype)
    model = ViTForImageClassification.from_pretrained(
        options.model, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    if options.engine == "compile":
        model = torch.compile(model, dynamic=True)
    mean, std = (
        torch.tensor(config[f"image_{name}"]).reshape(1, 3, 1, 1) for name in ("mean", "std")
    )

    def run(pictures: Sequence[Pixels]) -> NDArray[np.float32]:
        torch.set_num_threads(options.threads)  # it is the calling thread's own
        with torch.inference_mode():
            pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float()
            logits = model(pixel_values=(pixels * (1 / (255 * std)) - mean / std).to(dtype)).logits
            return logits.float().softmax(-1).numpy()

    return run


def _openvino(options: Options) -> Callable[[Sequence[Pixels]], NDArray[np.float32]]:
    """Return vitserve's graph, with a request of OpenVINO."""
    import openvino  # noqa: PLC0415  peers with torch need none

    settings = {
        "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[options.dtype],
        "INFERENCE_NUM_THREADS": options.threads,
        "ENABLE_CPU_PINNING": False,
    }
    request = (
        openvino.Core().compile_model(options.model / GRAPH, "CPU", settings).create_infer_request()
    )

    def run(pictures: Sequence[Pixels]) -> NDArray[np.float32]:
        [logits] = request.infer(
            [np.stack(pictures)], share_inputs=True, share_outputs=False
        ).values()
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        return odds / odds.sum(-1, keepdims=True)

    return run
