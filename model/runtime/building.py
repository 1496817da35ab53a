"""How a predictor's parts are made of a checkpoint with torch: device, dtype, network and backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, TypedDict

import torch

from model.checkpoint import Checkpoint
from model.config import ViTConfig
from model.errors import DeviceError, NewProcessNeeded, first_line
from model.network.library import largest_layer
from model.network.vit import VisionTransformer, count_parameters
from model.runtime.backend import Backend, BackendName, Built, CompileMode, batch_too_large
from model.runtime.batches import captured_sizes, powers_of_two
from model.runtime.choice import choose_backend
from model.runtime.cpu import ThreadPolicy, default_batch, default_streams
from model.runtime.cuda.batch_launcher import DeviceOps
from model.runtime.device import choose_device, choose_dtype, gpu_identifier
from model.runtime.float8 import CALIBRATION_SET, LEAST_AGREEMENT, agreement, calibration_images
from model.runtime.int8 import chosen_int8, require_same_model, torch_reference
from model.runtime.openvino.store import Keep
from model.runtime.torch_backend import TorchOptions

logger = logging.getLogger(__name__)

_CALIBRATION_BATCH: Final = 16
"""Small: its memory is taken before that of the largest batch."""

_GPU_STREAMS: Final = 2
"""Where none are chosen: one batch is uploaded, or its answer read, while the other computes."""

_GPU_BATCH: Final = 64
"""Largest batch where none is chosen; `benchmarks.gpu` measures which one is best."""

_DEFAULT_THREADS: Final = {"cpu": None, "cuda": 1}
"""Torch's threads on the CPU; beside a GPU there is little for them to do, and they would take cores from decoders."""


class PredictorOptions(TypedDict, total=False):
    """See `model.runtime.predictor.Predictor`."""

    device: str
    device_name: str | None
    dtype: str
    least_agreement: float | None
    compile_mode: CompileMode
    backend: BackendName
    max_batch: int | None
    threads: int | None
    streams: int | None
    launch_sizes: Sequence[int] | None
    graphs: bool
    ops: DeviceOps | None
    keep: Keep | None


class Builder:
    """Chooses the device and the dtype, and builds the network and its backend for them.

    Args:
        checkpoint, options: see `model.runtime.predictor.Predictor`.

    Attributes:
        may_overflow: whether the dtype was chosen here, and the network may have scores in it that are not finite.

    Raises:
        DeviceError: the device or dtype is not available here.
    """

    def __init__(self, checkpoint: Checkpoint, options: PredictorOptions) -> None:
        dtype, backend = options.get("dtype", "auto"), options.get("backend", "auto")
        compile_mode, graphs = options.get("compile_mode", "auto"), options.get("graphs", True)
        least_agreement, ops, keep = options.get("least_agreement"), options.get("ops"), options.get("keep")
        max_batch, threads, streams = options.get("max_batch"), options.get("threads"), options.get("streams")
        launch_sizes = options.get("launch_sizes")
        is_vit = isinstance(checkpoint.config, ViTConfig)
        if dtype == "float8" and not is_vit:
            raise DeviceError(f"dtype 'float8': {checkpoint.config.kind} has no blocks for it: choose bfloat16")
        self._checkpoint = checkpoint
        self._device = choose_device(options.get("device", "auto"))
        self._dtype = choose_dtype(dtype, self._device)
        self._float8 = dtype == "float8"
        on_cpu = self._device.type == "cpu"
        self._name = options.get("device_name") or str(self._device)
        sizes_up_to = powers_of_two if on_cpu and ops is None else captured_sizes
        if not launch_sizes:
            default = default_batch(largest_layer(checkpoint.config)) if on_cpu else _GPU_BATCH
            launch_sizes = sizes_up_to(max_batch or default)
        self._sizes = tuple(sorted(launch_sizes))
        if threads := threads or _DEFAULT_THREADS[self._device.type]:
            torch.set_num_threads(threads)
        self._threads = ThreadPolicy(torch.get_num_threads())
        self._streams = streams or (default_streams(self._threads.count) if on_cpu else _GPU_STREAMS)
        self._least = LEAST_AGREEMENT if least_agreement is None else least_agreement
        self._compile_mode, self._backend, self._graphs, self._ops = compile_mode, backend, graphs, ops
        self._int8 = chosen_int8(checkpoint, self._device, dtype, backend, compile_mode, self._least)
        self._may_do_without = dtype == "auto"
        self._keep = keep if self._int8 is None else None
        # A library's network may do without a dtype, a Vision Transformer overflow in float16.
        risks = (torch.float16,) if is_vit else (torch.float16, torch.bfloat16)
        self.may_overflow = dtype == "auto" and self._dtype in risks

    def build_in_float32(self) -> Built:
        """Return what `build` does, in float32."""
        self._dtype = torch.float32
        return self.build()

    def build(self) -> Built:
        """Return the parts of a predictor; where int8 was not asked for and does not run, without it.

        Raises: see `_build`.
        """
        try:
            return self._build()
        except DeviceError as error:
            if self._int8 is None or not self._may_do_without or isinstance(error, NewProcessNeeded):
                raise
            logger.warning("int8 is not used: %s", error)
            self._int8 = None
            return self._build()

    def _build(self) -> Built:
        """Return the parts of a predictor.

        Raises:
            DeviceError: the backend is not available here, or float8 agrees too seldom with bfloat16.
            CheckpointError: the weights are not what the config says, or int8 gives other logits altogether.
        """
        model = self._checkpoint.network()
        options = TorchOptions(
            model,
            self._checkpoint,
            self._device,
            self._dtype,
            self._compile_mode,
            self._sizes,
            self._graphs,
            float8=self._float8,
        )
        parameters = count_parameters(model)
        backend, reason = choose_backend(
            options,
            self._backend,
            threads=self._threads,
            streams=self._streams,
            ops=self._ops,
            keep=self._keep,
            int8=None if self._int8 is None else self._int8.products,
        )
        agrees, reference = None, None
        if self._int8 is not None:
            agrees, reference = self._int8.agreement, torch_reference(self._checkpoint)
            require_same_model(self._checkpoint, backend.logits, reference)
        if self._float8 and isinstance(model, VisionTransformer):
            agrees = self._require_agreement(model, backend)
        return Built(
            device=self._name,
            dtype=options.dtype_name if self._int8 is None else "int8",
            gpu_uuid=None if self._device.type == "cpu" else gpu_identifier(self._device),
            parameters=parameters,
            agreement=agrees,
            max_batch=self._sizes[-1],
            streams=self._streams,
            backend=backend,
            reason=reason,
            reference=reference,
        )

    def _require_agreement(self, model: VisionTransformer, backend: Backend) -> str:
        """Return how often the model in float8 gives bfloat16's best class.

        Raises:
            DeviceError: too seldom, or the model does not run, or has no classes.
        """
        if not self._checkpoint.config.num_classes:
            raise DeviceError(
                "dtype 'float8': it is checked by the best class, and the model has none: choose bfloat16"
            )
        images = calibration_images(self._checkpoint.preprocess)
        largest = self._sizes[-1]
        try:
            share = agreement(model, backend.logits, images, batch=min(largest, _CALIBRATION_BATCH))
        except torch.OutOfMemoryError as error:
            raise batch_too_large(self._name, largest) from error
        except RuntimeError as error:
            raise DeviceError(f"{self._name}: the model does not run: {first_line(error)}") from error
        text = f"bfloat16's best class on {share:.1%} of {CALIBRATION_SET}"
        if share < self._least:
            raise DeviceError(f"dtype 'float8': it gives {text}, and {self._least:.1%} are required: choose bfloat16")
        logger.info("float8 gives %s", text)
        return text
