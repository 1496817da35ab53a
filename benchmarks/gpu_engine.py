"""The engine alone: uint8 pictures in host memory go in, the top five classes in host memory come out.

`Ours` is `model.runtime.predictor.Predictor` as the service runs it. `Reference` is timm's ViT of the same weights
under torch.compile, or, where timm is not installed, a plain ViT of the same shapes and names; the record says which.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from model.checkpoint import Checkpoint
from model.config import ViTConfig
from model.runtime.compilation import CompilationState, CompileMode
from model.runtime.device import choose_device, choose_dtype
from model.runtime.predictor import Predictor

TOP_K = 5
_WARM_SHARE = 0.25
"""Of a measurement's time, spent before it counts."""


def random_pictures(checkpoint: Checkpoint, count: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [count, H, W, C]; noise, as matrix products run faster on zeros."""
    config = checkpoint.config
    shape = (count, *config.image_size, config.in_channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class Ours:
    """Our predictor, given batches by as many threads as it has streams.

    Args:
        batches: sizes that will be measured; only these (and 1) are compiled.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, device: str, dtype: str, compile_mode: CompileMode, batches: Sequence[int]
    ) -> None:
        started = time.perf_counter()
        self.checkpoint = checkpoint
        self.predictor = Predictor(
            checkpoint,
            device=device,
            dtype=dtype,
            compile_mode=compile_mode,
            backend="torch",
            launch_sizes=sorted({1, *batches}),
        )
        self.predictor.warm_up()
        while self.predictor.compilation.state is CompilationState.COMPILING:
            time.sleep(0.05)
        self.ready_seconds = time.perf_counter() - started

    def rate(self, batch: int, seconds: float) -> float:
        """Images per second of batches of one size."""
        done = [0] * self.predictor.streams
        stop = threading.Event()
        failures: list[BaseException] = []

        def work(stream: int) -> None:
            # Several batches in turn, so that none is answered from a cache.
            turn = itertools.cycle([random_pictures(self.checkpoint, batch, seed=seed) for seed in range(3)])
            try:
                while not stop.is_set():
                    self.predictor.predict(next(turn), top_k=TOP_K)
                    done[stream] += batch
            except RuntimeError as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(stream,)) for stream in range(len(done))]
        for thread in threads:
            thread.start()
        while not all(done) and not failures:
            time.sleep(0.001)
        time.sleep(_WARM_SHARE * seconds)
        before, began = sum(done), time.perf_counter()
        time.sleep(seconds)
        after, ended = sum(done), time.perf_counter()
        stop.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return (after - before) / (ended - began)

    def latency(self, seconds: float) -> dict[str, float]:
        """Milliseconds of one picture alone, from the call to the answer."""
        picture = random_pictures(self.checkpoint, 1)
        return _percentiles(lambda: self.predictor.predict(picture, top_k=TOP_K), seconds)

    def top1(self, pictures: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Best class of each picture."""
        step = self.predictor.max_batch
        parts = [
            self.predictor.predict(pictures[at : at + step], top_k=1).indices[:, 0]
            for at in range(0, len(pictures), step)
        ]
        return np.concatenate(parts)


class Reference:
    """The reference's model, with normalisation, softmax and top-k in the same compiled function.

    Its pictures lie in pinned memory already, which ours have to be copied to.

    Args:
        mode: of torch.compile; None leaves it uncompiled.
    """

    def __init__(self, checkpoint: Checkpoint, *, device: str, dtype: str, mode: str | None) -> None:
        self.checkpoint = checkpoint
        self._device = choose_device(device)
        self._dtype = choose_dtype(dtype, self._device)
        model, self.name = reference_model(checkpoint)
        self._model = model.to(self._device, self._dtype).eval().requires_grad_(False)
        mean = torch.tensor(checkpoint.preprocess.mean).reshape(1, -1, 1, 1).to(self._device)
        std = torch.tensor(checkpoint.preprocess.std).reshape(1, -1, 1, 1).to(self._device)

        def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
            normal = ((pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std).to(self._dtype)
            scores = self._model(normal).float().softmax(dim=-1)
            return cast("tuple[Tensor, Tensor]", scores.topk(min(TOP_K, scores.shape[-1])))

        # Beyond its limit torch would go on uncompiled, in silence: one entry a batch size.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self._answer: Callable[[Tensor], tuple[Tensor, Tensor]] = answer
        if mode is not None:
            self._answer = torch.compile(answer, mode=mode, dynamic=False)

    @torch.no_grad()
    def rate(self, batch: int, seconds: float) -> float:
        """Images per second, each batch uploaded, computed and read back."""
        turn = itertools.cycle([self._pinned(random_pictures(self.checkpoint, batch, seed=seed)) for seed in range(3)])

        def work() -> None:
            scores, indices = self._answer(next(turn).to(self._device, non_blocking=True))
            scores.cpu(), indices.cpu()

        return self._rate(work, batch, seconds)

    @torch.no_grad()
    def resident_rate(self, batch: int, seconds: float) -> float:
        """Images per second of pictures that lie on the device, whose answers stay there: no copies, no waiting."""
        pictures = torch.from_numpy(random_pictures(self.checkpoint, batch)).to(self._device)

        def work() -> None:
            for _ in range(4):
                self._answer(pictures)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return self._rate(work, 4 * batch, seconds)

    @torch.no_grad()
    def latency(self, seconds: float) -> dict[str, float]:
        """Milliseconds of one picture alone, from host memory to host memory."""
        picture = self._pinned(random_pictures(self.checkpoint, 1))

        def work() -> None:
            scores, indices = self._answer(picture.to(self._device, non_blocking=True))
            scores.cpu(), indices.cpu()

        return _percentiles(work, seconds)

    @torch.no_grad()
    def top1(self, pictures: NDArray[np.uint8], *, batch: int) -> NDArray[np.int64]:
        """Best class of each picture; they are a multiple of `batch`."""
        parts = [
            self._answer(torch.from_numpy(pictures[at : at + batch]).to(self._device))[1][:, 0].cpu().numpy()
            for at in range(0, len(pictures), batch)
        ]
        return np.concatenate(parts)

    def _pinned(self, pictures: NDArray[np.uint8]) -> Tensor:
        tensor = torch.from_numpy(pictures)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    @staticmethod
    def _rate(work: Callable[[], None], images: int, seconds: float) -> float:
        for _ in range(3):  # compiles, and records CUDA graphs
            work()
        end = time.perf_counter() + _WARM_SHARE * seconds
        while time.perf_counter() < end:
            work()
        done, began = 0, time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            work()
            done += images
        return done / (now - began)


def _percentiles(work: Callable[[], Any], seconds: float) -> dict[str, float]:
    for _ in range(5):
        work()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 10:
        began = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - began))
    cuts = statistics.quantiles(taken, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49], 3), "p99_ms": round(cuts[98], 3), "calls": len(taken)}


def reference_model(checkpoint: Checkpoint) -> tuple[nn.Module, str]:
    """timm's ViT with the checkpoint's weights, or a plain one; and its name for the record."""
    config = checkpoint.config
    tensors = dict(checkpoint.tensors)
    if importlib.util.find_spec("timm") is not None:
        try:
            return _timm(config, tensors)
        except (ImportError, RuntimeError) as error:  # timm needs torchvision, which must fit this torch
            reason = f"timm is installed but does not load: {str(error).splitlines()[0]}"
    else:
        reason = "timm is not installed"
    plain = PlainViT(config)
    plain.load_state_dict(tensors)
    return plain, f"plain ViT with scaled_dot_product_attention, in timm's place ({reason})"


def _timm(config: ViTConfig, tensors: dict[str, Tensor]) -> tuple[nn.Module, str]:
    import timm  # noqa: PLC0415  optional
    from timm.models.vision_transformer import VisionTransformer  # noqa: PLC0415

    found: nn.Module = VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        num_classes=config.num_classes,
    )
    found.load_state_dict(tensors)
    return found, f"timm {timm.__version__}"


class PlainViT(nn.Module):
    """The paper's ViT, written down without any of our tricks; parameters are named as timm's."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, patch = config.width, config.patch_size
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(config.in_channels, width, patch, stride=patch)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, config.position_tokens, width))
        self.blocks = nn.Sequential(*(_PlainBlock(config) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, config.num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, C, H, W] -> logits [B, K]."""
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


class _PlainBlock(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, config.mlp_width), "fc2": nn.Linear(config.mlp_width, width)})

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.attn["qkv"](self.norm1(x)).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(0))
        x = x + self.attn["proj"](attended.transpose(1, 2).reshape(batch, tokens, width))
        return cast("Tensor", x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x)))))
