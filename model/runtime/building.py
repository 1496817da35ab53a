"""How a predictor's parts are made of a checkpoint with torch: device, dtype, network and backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, TypedDict

import torch

from model.checkpoint import Checkpoint
from model.config import ViTConfig
from model.cores import compute_threads
from model.network.library import largest_layer
from model.network.vit import count_parameters
from model.runtime.backend import Built, CompileMode
from model.runtime.batches import captured_sizes, powers_of_two
from model.runtime.choice import choose_backend
from model.runtime.cpu import ThreadPolicy, default_batch, default_streams
from model.runtime.cuda.batch_launcher import DeviceOps
from model.runtime.device import choose_device, choose_dtype, gpu_identifier
from model.runtime.openvino.store import Keep
from model.runtime.torch_backend import TorchOptions

logger = logging.getLogger(__name__)

_GPU_STREAMS: Final = 2
"""Where none are chosen: one batch is uploaded, or its answer read, while the other computes."""

_GPU_BATCH: Final = 64
"""Largest batch where none is chosen; `benchmarks.gpu` measures which one is best."""


class PredictorOptions(TypedDict, total=False):
    """See `model.runtime.predictor.Predictor`."""

    device: str
    device_name: str | None
    dtype: str
    compile_mode: CompileMode
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
        dtype = options.get("dtype", "auto")
        compile_mode, graphs = options.get("compile_mode", "auto"), options.get("graphs", True)
        ops, keep = options.get("ops"), options.get("keep")
        max_batch, threads, streams = options.get("max_batch"), options.get("threads"), options.get("streams")
        launch_sizes = options.get("launch_sizes")
        is_vit = isinstance(checkpoint.config, ViTConfig)
        self._checkpoint = checkpoint
        self._device = choose_device(options.get("device", "auto"))
        self._dtype = choose_dtype(dtype, self._device)
        on_cpu = self._device.type == "cpu"
        self._name = options.get("device_name") or str(self._device)
        sizes_up_to = powers_of_two if on_cpu and ops is None else captured_sizes
        if not launch_sizes:
            default = default_batch(largest_layer(checkpoint.config)) if on_cpu else _GPU_BATCH
            launch_sizes = sizes_up_to(max_batch or default)
        self._sizes = tuple(sorted(launch_sizes))
        threads = threads or (compute_threads() if on_cpu else 1)
        torch.set_num_threads(threads)
        self._threads = ThreadPolicy(threads)
        self._streams = streams or (default_streams(self._threads.count) if on_cpu else _GPU_STREAMS)
        self._compile_mode, self._graphs, self._ops = compile_mode, graphs, ops
        self._keep = keep
        # A library's network may do without a dtype, a Vision Transformer overflow in float16.
        risks = (torch.float16,) if is_vit else (torch.float16, torch.bfloat16)
        self.may_overflow = dtype == "auto" and self._dtype in risks

    def build_in_float32(self) -> Built:
        """Return what `build` does, in float32."""
        self._dtype = torch.float32
        return self.build()

    def build(self) -> Built:
        """Return the parts of a predictor.

        Raises:
            DeviceError: the backend is not available here.
            CheckpointError: the weights are not what the config says.
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
        )
        parameters = count_parameters(model)
        backend, reason = choose_backend(
            options,
            threads=self._threads,
            streams=self._streams,
            ops=self._ops,
            keep=self._keep,
        )
        return Built(
            device=self._name,
            dtype=options.dtype_name,
            gpu_uuid=None if self._device.type == "cpu" else gpu_identifier(self._device),
            parameters=parameters,
            max_batch=self._sizes[-1],
            streams=self._streams,
            backend=backend,
            reason=reason,
        )
