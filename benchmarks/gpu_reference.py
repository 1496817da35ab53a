"""What the engine is compared with: timm's ViT of the same weights under torch.compile, in a process of its own.

Of its own, so that neither side's allocator, compiler and CUDA context meet the other's, and its memory is given back
when it ends.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.gpu_engine import TOP_K, percentiles, random_pictures, rate_of
from benchmarks.gpu_machine import kernels
from model.checkpoint import Checkpoint, load_checkpoint
from model.runtime.device import choose_device, choose_dtype


class ReferenceProcess:
    """A `Reference` in another process; its methods take and return what `Reference`'s do.

    Args:
        patience: gives the seconds that a call may take: max-autotune compiles a batch size for minutes.

    Raises:
        RuntimeError: with the process's own words, when it fails or ends.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        patience: Callable[[], float],
        device: str,
        dtype: str,
        mode: str | None,
    ) -> None:
        self._patience = patience
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        options = {"device": device, "dtype": dtype, "mode": mode}
        self._process = context.Process(target=_serve, args=(theirs, str(checkpoint), options), daemon=True)
        self._process.start()
        theirs.close()
        self.name = str(self._answer())

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `Reference`."""
        self._connection.send((method, arguments))
        return self._answer()

    def close(self) -> None:
        """End the process, and with it its memory on the device."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self) -> Any:
        try:
            if not self._connection.poll(self._patience()):
                raise RuntimeError("the reference did not answer in time")
            done, answer = self._connection.recv()
        except EOFError:
            self._process.join(10)
            raise RuntimeError(f"the reference's process ended with {self._process.exitcode}") from None
        if not done:
            raise RuntimeError(f"the reference: {answer}")
        return answer


def _serve(connection: Any, checkpoint: str, options: dict[str, Any]) -> None:
    """Make a `Reference`, send its name, and answer calls until the other side closes; failures are sent as words."""
    try:
        reference = Reference(load_checkpoint(checkpoint), **options)
    except Exception as error:  # noqa: BLE001  whatever it is, the other side has to be told
        connection.send((False, f"{type(error).__name__}: {error}"))
        return
    connection.send((True, reference.name))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(reference, method)(*arguments)
        except Exception as error:  # noqa: BLE001  as above
            answer = False, f"{type(error).__name__}: {error}"
        connection.send(answer)


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
        model, name = timm_model(checkpoint)
        self.name = f"{name}, {'uncompiled' if mode is None else mode}"
        self._model = model.to(self._device, self._dtype).eval().requires_grad_(False)
        mean = torch.tensor(checkpoint.preprocess.mean).reshape(1, -1, 1, 1).to(self._device)
        std = torch.tensor(checkpoint.preprocess.std).reshape(1, -1, 1, 1).to(self._device)

        def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
            normal = ((pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std).to(self._dtype)
            scores = self._model(normal).float().softmax(dim=-1)
            return cast("tuple[Tensor, Tensor]", scores.topk(min(TOP_K, scores.shape[-1])))

        self._answer: Callable[[Tensor], tuple[Tensor, Tensor]] = answer
        if mode is not None:
            # Beyond its limit torch would go on uncompiled, in silence: one entry a batch size.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            self._answer = torch.compile(answer, mode=mode, dynamic=False)

    @torch.no_grad()
    def rate(self, batch: int, seconds: float) -> float:
        """Images per second, each batch uploaded, computed and read back."""
        turn = itertools.cycle([self._pinned(random_pictures(self.checkpoint, batch, seed=seed)) for seed in range(3)])

        def work() -> None:
            scores, indices = self._answer(next(turn).to(self._device, non_blocking=True))
            scores.cpu(), indices.cpu()

        return rate_of(work, batch, seconds)

    @torch.no_grad()
    def resident_rate(self, batch: int, seconds: float) -> float:
        """Images per second of pictures that lie on the device, whose answers stay there: no copies, no waiting."""
        pictures = torch.from_numpy(random_pictures(self.checkpoint, batch)).to(self._device)

        def work() -> None:
            for _ in range(4):
                self._answer(pictures)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return rate_of(work, 4 * batch, seconds)

    @torch.no_grad()
    def latency(self, seconds: float) -> dict[str, float]:
        """Milliseconds of one picture alone, from host memory to host memory."""
        picture = self._pinned(random_pictures(self.checkpoint, 1))

        def work() -> None:
            scores, indices = self._answer(picture.to(self._device, non_blocking=True))
            scores.cpu(), indices.cpu()

        return percentiles(work, seconds)

    @torch.no_grad()
    def top1(self, pictures: NDArray[np.uint8], batch: int) -> NDArray[np.int64]:
        """Best class of each picture; they are a multiple of `batch`."""
        parts = [
            self._answer(torch.from_numpy(pictures[at : at + batch]).to(self._device))[1][:, 0].cpu().numpy()
            for at in range(0, len(pictures), batch)
        ]
        return np.concatenate(parts)

    @torch.no_grad()
    def kernels(self, batch: int) -> dict[str, Any]:
        """Profile one batch of pictures that lie on the device; see `gpu_machine.kernels`."""
        pictures = torch.from_numpy(random_pictures(self.checkpoint, batch)).to(self._device)
        for _ in range(3):  # compiles, and records CUDA graphs
            self._answer(pictures)
        return kernels(lambda: self._answer(pictures), str(self._device))

    def _pinned(self, pictures: NDArray[np.uint8]) -> Tensor:
        tensor = torch.from_numpy(pictures)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def timm_model(checkpoint: Checkpoint) -> tuple[nn.Module, str]:
    """timm's ViT with the checkpoint's weights, and its name for the record.

    Raises:
        ImportError: timm or torchvision is not installed.
    """
    with suppress(RuntimeError, OSError):  # its operators may be of another torch, and then are declared
        import torchvision  # noqa: F401, PLC0415
    from tests.timm_reference import declare_torchvision_operators  # noqa: PLC0415  needs pytest

    declare_torchvision_operators()
    import timm  # noqa: PLC0415
    from timm.models.vision_transformer import VisionTransformer  # noqa: PLC0415

    config = checkpoint.vit
    found: nn.Module = VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        num_classes=config.num_classes,
    )
    found.load_state_dict(dict(checkpoint.tensors))
    return found, f"timm {timm.__version__}"
