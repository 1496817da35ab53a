"""The model on its device: a batch of uint8 images in, top-k and attention maps out.

One thread owns a predictor: it builds it and warms it up. `predict` may then be called by as many
threads at once as there are streams.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.checkpoint import Checkpoint
from model.errors import DeviceError
from model.explanation.attention_map import cls_map
from model.network.layers.attention import Attention
from model.network.layers.attention_kernels import chunked_attention
from model.network.layers.patch_embed import PatchEmbed
from model.network.vit import VisionTransformer, ViTOutput, count_parameters
from model.prediction import AttentionMap, BatchPrediction, MapRequest
from model.runtime.batch_launcher import CAPTURED_TOP_K, BatchLauncher, DeviceOps
from model.runtime.cuda_ops import CudaOps
from model.runtime.device import choose_device, choose_dtype
from model.runtime.openvino_network import OpenVinoNetwork, unsupported_reason
from model.runtime.packing import pack, unpack

logger = logging.getLogger(__name__)

Compile = Literal["auto", "on", "max", "off"]
Backend = Literal["auto", "torch", "openvino"]

_PENDING: Final = "compiling"
_CPU_STREAMS: Final = 2
_CUDA_STREAMS: Final = 2
"""One batch is uploaded, or its answer read, while the other computes."""

_DEFAULT_MAX_BATCH: Final = {"cpu": 32, "cuda": 64}


class Predictor:
    """Owns device, dtype, compilation and warm-up of one model.

    Args:
        checkpoint: what to serve.
        device: see `model.runtime.device.choose_device`.
        dtype: see `model.runtime.device.choose_dtype`.
        compile_mode: `auto` compiles on CUDA; `on` also on the CPU; `max` times several kernels for every
            matrix product first, which takes minutes. A compiler that is missing or fails is logged, told by
            `compiled`, and the model runs uncompiled. Unless `off`, on CUDA each launch size becomes a CUDA graph.
        backend: what runs the network: `torch`; `openvino`, on a CPU; or `auto`, which is OpenVINO where it is
            installed, has the dtype and agrees with torch, unless torch is to compile.
        max_batch: largest batch ever launched; None for the device's default.
        threads: threads that compute on the CPU; None leaves torch's choice.
        streams: batches under way at the same time; None for the device's default.
        launch_sizes: the batch sizes to compile for, instead of powers of two; the largest is `max_batch`.

    Attributes:
        batch_sizes: the only sizes launched when compiled (smaller batches are padded up);
            None when any size up to `max_batch` is.
        compiled: `compiled`, `compiling`, or why not.

    Raises:
        DeviceError: the device, dtype or backend is not available here.
        CheckpointError: the weights are not what the config says.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "auto",
        dtype: str = "auto",
        compile_mode: Compile = "auto",
        backend: Backend = "torch",
        max_batch: int | None = None,
        threads: int | None = None,
        streams: int | None = None,
        launch_sizes: Sequence[int] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self._device = choose_device(device)
        self._dtype = choose_dtype(dtype, self._device)
        self._launch_sizes = tuple(sorted(launch_sizes)) if launch_sizes else None
        self.max_batch = max(launch_sizes) if launch_sizes else max_batch or _DEFAULT_MAX_BATCH[self._device.type]
        if threads is not None:
            torch.set_num_threads(threads)
        self._threads = _Threads(torch.get_num_threads())
        on_cpu = self._device.type == "cpu"
        self.streams = streams or (min(_CPU_STREAMS, self._threads.all) if on_cpu else _CUDA_STREAMS)
        model = checkpoint.build()
        self.parameters = count_parameters(model)
        # Normalisation in float32, on the device, folded into one multiply and add: (x/255 - mean) / std.
        std = torch.tensor(checkpoint.preprocess.std, dtype=torch.float64)
        mean = torch.tensor(checkpoint.preprocess.mean, dtype=torch.float64)
        self._scale = (1 / (255 * std)).float().reshape(1, -1, 1, 1)
        self._shift = (-mean / std).float().reshape(1, -1, 1, 1)
        self._openvino = self._open_openvino(model, backend, compile_mode)
        self._choose_kernels(model)
        try:
            self._plain = model.to(device=self._device, dtype=self._dtype)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{self._device}: not enough memory for {self.parameters:,} parameters") from error
        self._model = self._plain
        self._scale, self._shift = self._scale.to(self._device), self._shift.to(self._device)
        self._fused_normalise: Callable[[Tensor], Tensor] | None = None
        self.batch_sizes: tuple[int, ...] | None = None
        self._autotune = compile_mode == "max"
        self.compiled = self._compile_plan(compile_mode if self._openvino is None else "off")
        self._launcher: BatchLauncher | None = None
        if not on_cpu:
            self._launch_with(CudaOps(self._device))

    @property
    def device(self) -> str:
        """Name of the device: `cpu` or `cuda:N`."""
        return str(self._device)

    @property
    def gpu_uuid(self) -> str | None:
        """Which GPU this is, whatever its number; None on the CPU."""
        return None if self._device.type == "cpu" else str(torch.cuda.get_device_properties(self._device).uuid)

    @property
    def dtype(self) -> str:
        """Name of the dtype that the network runs in."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def backend(self) -> str:
        """What runs the network, with its version; attention of other layers than the last is always torch's."""
        return f"torch {torch.__version__}" if self._openvino is None else f"openvino {self._openvino.version}"

    def warm_up(self) -> None:
        """Run the model once at its smallest and largest batch, so that no request pays for allocations.

        On CUDA a compiled model is compiled and captured here, for every launch size. On the CPU it is compiled on a
        thread of its own while the uncompiled model already answers, and takes over when it is done.

        Raises:
            DeviceError: the model gives scores that are not finite, or does not run at all.
        """
        self._check((1, self.max_batch))
        if self._launcher is not None:
            if self.compiled == _PENDING:
                self._compile()
            if self.compiled != "off":
                self._capture(self._launcher)
        elif self.compiled == _PENDING:
            threading.Thread(target=self._compile, name="compile", daemon=True).start()

    def check(self) -> None:
        """Run the smallest batch, to see whether the device still computes.

        Raises:
            DeviceError: it does not, or gives scores that are not finite.
        """
        self._check((1,))

    def _check(self, sizes: Sequence[int]) -> None:
        try:
            self._exercise(self._model, sizes)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{self.device}: not enough memory for batches of {max(sizes)}: a smaller largest batch needs less"
            ) from error
        except RuntimeError as error:
            raise DeviceError(f"{self.device}: the model does not run: {_first_line(error)}") from error

    def _exercise(self, model: VisionTransformer, sizes: Sequence[int]) -> None:
        rows, columns = self.config.image_size
        for size in sizes:
            images = torch.zeros((size, rows, columns, self.config.in_channels), dtype=torch.uint8, device=self._device)
            with torch.inference_mode():
                for layers in self._usual_layers:
                    logits = model(self._prepare(images), layers).logits
                if self._openvino is not None:
                    logits = logits + self._openvino(images.numpy(), alone=True).logits
            if not logits.isfinite().all():
                raise DeviceError(f"{self.device}: warm-up gave scores that are not finite in {self.dtype}")

    @torch.inference_mode()
    def predict(
        self, images: NDArray[np.uint8], *, top_k: int, maps: Sequence[MapRequest | None] = ()
    ) -> BatchPrediction:
        """Classify a batch.

        Args:
            images: uint8 [B, H, W, C] with H, W, C the model's input; 1 <= B <= max_batch.
            top_k: how many classes to return, 1 ... num_classes.
            maps: empty, or one entry an image.

        Raises:
            ValueError: wrong shape, too large a batch, or `maps` of another length.
            RuntimeError: as torch raises it (out of memory, a device fault).
        """
        count = len(images)
        expected = (*self.config.image_size, self.config.in_channels)
        if images.dtype != np.uint8 or images.shape[1:] != expected or not 1 <= count <= self.max_batch:
            raise ValueError(
                f"images {images.dtype} {images.shape}: expected uint8 [1...{self.max_batch}, *{expected}]"
            )
        if maps and len(maps) != count:
            raise ValueError(f"{len(maps)} map requests for {count} images")
        layers = tuple(sorted({request.layer for request in maps if request is not None}))
        if self._launcher is not None:
            return self._launch(self._launcher, images, layers, top_k, maps)
        with self._threads as alone:
            return self._predict(images, layers, top_k, maps, alone)

    def _predict(
        self,
        images: NDArray[np.uint8],
        layers: tuple[int, ...],
        top_k: int,
        maps: Sequence[MapRequest | None],
        alone: bool,
    ) -> BatchPrediction:
        count = len(images)
        output = self._forward(images, layers, alone)
        scores, finite = self._scores(output.logits[:count])
        top = scores.topk(top_k, dim=-1)
        found: list[AttentionMap | None] = [None] * count
        if output.attention is not None:
            self._fill_maps(found, output.attention, layers, maps)
        return BatchPrediction(top.values.cpu().numpy(), top.indices.cpu().numpy(), finite.cpu().numpy(), found)

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [B, num_classes], and bool [B]: whether all of a row is finite."""
        logits = logits.float() / self.checkpoint.temperature
        independent = self.checkpoint.multi_label or self.config.num_classes == 1
        scores = logits.sigmoid() if independent else logits.softmax(dim=-1)
        # A row with one NaN is all NaN after the softmax; a sigmoid keeps it in its place.
        return scores, scores.isfinite().all(dim=-1)

    def _launch(
        self,
        launcher: BatchLauncher,
        images: NDArray[np.uint8],
        layers: tuple[int, ...],
        top_k: int,
        maps: Sequence[MapRequest | None],
    ) -> BatchPrediction:
        """The same as `_predict`; all of the answer comes from the device in one piece."""
        size = self.launch_size(len(images))
        packed, packed_k = launcher.run(images, size=size, layers=layers, top_k=top_k)
        answer = unpack(packed, top_k=packed_k, layers=len(layers), heads=self.config.heads)
        found: list[AttentionMap | None] = [None] * len(images)
        if answer.attention is not None:
            self._fill_maps(found, torch.from_numpy(answer.attention), layers, maps)
        return BatchPrediction(answer.scores[:, :top_k], answer.indices[:, :top_k], answer.finite, found)

    def _answer(self, pixels: Tensor, layers: tuple[int, ...], top_k: int) -> Tensor:
        """uint8 [B, H, W, C] on the device -> `model.runtime.packing`'s int32 [B, width] there."""
        output: ViTOutput = self._model_for(layers)(self._prepare(pixels), layers)
        scores, finite = self._scores(output.logits)
        top = scores.topk(top_k, dim=-1)
        return pack(top.values, top.indices, finite, output.attention)

    def _model_for(self, layers: tuple[int, ...]) -> VisionTransformer:
        """Rows of other layers come from the uncompiled model: nobody is to wait for a compiler."""
        return self._model if layers in self._usual_layers else self._plain

    @property
    def _usual_layers(self) -> tuple[tuple[int, ...], ...]:
        """What is compiled and captured: no map, or the default one."""
        return (), (self.config.depth - 1,)

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Raw logits, before temperature: float32 [B, num_classes]; for parity tests and calibration."""
        with torch.inference_mode():
            output = self._forward(images, (), alone=True)
            result: NDArray[np.float32] = output.logits[: len(images)].float().cpu().numpy()
            return result

    def _forward(self, images: NDArray[np.uint8], layers: tuple[int, ...], alone: bool) -> ViTOutput:
        if self._openvino is not None and (not layers or (self._openvino.has_row and layers in self._usual_layers)):
            return self._openvino(images, alone=alone)
        missing = self.launch_size(len(images)) - len(images)
        if missing:
            images = np.concatenate([images, np.repeat(images[-1:], missing, axis=0)])
        batch = torch.from_numpy(np.ascontiguousarray(images)).to(self._device)
        output: ViTOutput = self._model_for(layers)(self._prepare(batch), layers)
        return output

    def _prepare(self, batch: Tensor) -> Tensor:
        """As `_normalise`, compiled where that is done."""
        return (self._fused_normalise or self._normalise)(batch)

    def _normalise(self, batch: Tensor) -> Tensor:
        """uint8 [B, H, W, C] -> the model's dtype [B, C, H, W]."""
        pixels = batch.permute(0, 3, 1, 2).float()
        return (pixels * self._scale + self._shift).to(self._dtype)

    def launch_size(self, count: int) -> int:
        """The size that a batch of `count` images is launched at."""
        sizes = self.batch_sizes
        if sizes is None:
            return count
        return next(size for size in sizes if size >= count)

    def _fill_maps(
        self,
        found: list[AttentionMap | None],
        attention: Tensor,
        layers: tuple[int, ...],
        maps: Sequence[MapRequest | None],
    ) -> None:
        """Requests of the same layer and head, however mixed the batch, are one operation."""
        groups: dict[MapRequest, list[int]] = {}
        for index, request in enumerate(maps):
            if request is not None:
                groups.setdefault(request, []).append(index)
        for request, members in groups.items():
            rows = attention[members, layers.index(request.layer)]
            made = cls_map(rows, head=request.head, prefix_tokens=self.config.prefix_tokens, grid=self.config.grid)
            values, kept = made.values.cpu().numpy(), made.kept_mass.cpu().tolist()
            for position, member in enumerate(members):
                found[member] = AttentionMap(request.layer, request.head, values[position], kept[position])

    def _choose_kernels(self, model: VisionTransformer) -> None:
        for module in model.modules():
            if isinstance(module, Attention) and self._device.type == "cpu":
                module.attend = chunked_attention
            elif isinstance(module, PatchEmbed) and self._device.type == "cuda":
                module.as_product = True

    def _open_openvino(
        self, model: VisionTransformer, backend: Backend, compile_mode: Compile
    ) -> OpenVinoNetwork | None:
        """The network in OpenVINO if it is asked for, or pays and is there.

        Raises:
            DeviceError: it is asked for and cannot be.
        """
        if backend == "torch" or (backend == "auto" and compile_mode in ("on", "max")):
            return None
        reason = unsupported_reason(self._device, self._dtype)
        if reason is None:
            try:
                return OpenVinoNetwork(
                    model,
                    self._scale,
                    self._shift,
                    dtype=self._dtype,
                    threads=self._threads.all,
                    streams=self.streams,
                )
            except DeviceError as error:
                if backend == "openvino":
                    raise
                logger.warning("torch runs the network: %s", error)
        elif backend == "openvino":
            raise DeviceError(f"backend openvino: {reason}")
        return None

    def _compile_plan(self, mode: Compile) -> str:
        if mode == "off":
            return "off"
        if mode == "auto" and self._device.type == "cpu":
            return "off on the CPU unless asked for"
        if shutil.which("g++") is None:
            logger.warning("not compiled: no C++ compiler (g++) on this machine")
            return "no C++ compiler (g++) on this machine"
        return _PENDING

    def _compile(self) -> None:
        """Compile a twin that shares the weights, exercise it at every launch size, then let it take over."""
        started = time.monotonic()
        # Fixed shapes only, as dynamic ones ran no faster than uncompiled.
        sizes = self._sizes()
        # Three kinds of block a size (any but the last, the last with and without the attention row); beyond the
        # limit torch gives up in silence.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(sizes))
        mode = "max-autotune-no-cudagraphs" if self._autotune else None
        with torch.device("meta"):
            twin = VisionTransformer(self.config)
        twin.load_state_dict(self._model.state_dict(), assign=True)
        twin.eval().requires_grad_(False)
        self._choose_kernels(twin)
        for block in twin.blocks:
            # One block's code serves all of them: compiling regions takes a fraction of the whole model's time.
            block.compile(dynamic=False, mode=mode)
        if self._launcher is not None:
            # What is cheap on a CPU is many small kernels on a GPU: normalising, adding positions, joining tokens.
            self._fused_normalise = torch.compile(self._normalise, dynamic=False)
            twin.embed = torch.compile(twin.embed, dynamic=False, mode=mode)  # type: ignore[method-assign]
        try:
            self._exercise(twin, sizes)
        except (RuntimeError, OSError) as error:  # what torch.compile raises for its backends and their compilers
            self._fused_normalise = None
            self.compiled = f"failed: {_first_line(error)}"
            logger.warning("compilation failed, running uncompiled: %s", _first_line(error))
            return
        # In this order: a launch that reads the new sizes with the old model is padded for nothing, no more.
        self.batch_sizes = sizes
        self._model = twin
        self.compiled = "compiled"
        logger.info("compiled for batches of %s in %.0f s", ", ".join(map(str, sizes)), time.monotonic() - started)

    def _sizes(self) -> tuple[int, ...]:
        """Powers of two up to the largest batch, unless told otherwise."""
        if self._launch_sizes is not None:
            return self._launch_sizes
        sizes = [1]
        while sizes[-1] < self.max_batch:
            sizes.append(min(2 * sizes[-1], self.max_batch))
        return tuple(sizes)

    def _launch_with(self, ops: DeviceOps) -> None:
        """Send batches through a launcher.

        Raises:
            DeviceError: not enough memory for the largest batch's images.
        """
        shape = (*self.config.image_size, self.config.in_channels)
        try:
            self._launcher = BatchLauncher(ops, self._answer, shape=shape, max_batch=self.max_batch, slots=self.streams)
        except RuntimeError as error:
            raise DeviceError(f"{self.device}: batches of {self.max_batch} do not fit: {_first_line(error)}") from error

    def _capture(self, launcher: BatchLauncher) -> None:
        """Turn each launch size into a graph, of the compiled model or, failing that, of the uncompiled one."""
        started = time.monotonic()
        sizes = self._sizes()
        try:
            launcher.capture(sizes, self._usual_layers, top_k=min(CAPTURED_TOP_K, self.config.num_classes))
        except RuntimeError as error:
            self.compiled += f"; no CUDA graphs: {_first_line(error)}"
            logger.warning("no CUDA graphs: %s", _first_line(error))
            return
        self.batch_sizes = sizes
        if self.compiled != "compiled":
            self.compiled += "; CUDA graphs of the uncompiled model"
        logger.info("captured for batches of %s in %.0f s", ", ".join(map(str, sizes)), time.monotonic() - started)


class _Threads:
    """How many threads compute one batch: all of them when it is alone, one when others compute beside it.

    A batch an own thread needs no barrier between operators, at which threads wait for each other
    longest when the machine is busy; a lone batch is sooner done with all of them.
    """

    def __init__(self, count: int) -> None:
        self.all = count
        self._lock = threading.Lock()
        self._running = 0

    def __enter__(self) -> bool:
        with self._lock:
            self._running += 1
            alone = self._running == 1
        torch.set_num_threads(self.all if alone else 1)  # of the calling thread
        return alone

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
