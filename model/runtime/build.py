"""Builds a predictor's parts with torch: device, dtype, network and backend."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypedDict

import torch

from model.checkpoint import Checkpoint
from model.config import ViTConfig
from model.errors import DeviceError
from model.network.library import largest_layer
from model.network.vit import count_parameters
from model.runtime.backend import Backend, CompileMode, Parts
from model.runtime.batch_request import GraphKind
from model.runtime.batch_sizes import captured_sizes
from model.runtime.cpu import ThreadPolicy, default_batch
from model.runtime.cuda.backend import Cuda
from model.runtime.cuda.batch_launcher import DeviceOps
from model.runtime.cuda.ops import CudaOps
from model.runtime.device import choose_device, choose_dtype, gpu_identifier
from model.runtime.openvino.backend import REASON, OpenVino
from model.runtime.openvino.kept import Keep
from model.runtime.openvino.network import OpenVinoNetwork, unsupported_reason
from model.runtime.openvino.tracing import traced_network
from model.runtime.torch_backend import TorchCpu, TorchOptions

logger = logging.getLogger(__name__)

# Batches that a GPU computes at once if no number is chosen: one is uploaded, or its answer
# downloaded, while the other computes.
_GPU_STREAMS: Final = 2

# Largest batch if none is chosen; `benchmarks.gpu` measures which one is best.
_GPU_BATCH: Final = 64


class PredictorOptions(TypedDict, total=False):
    """Options of a predictor.

    Attributes:
        device: see `choose_device`.
        device_name: name of the device, if its number differs in this process.
        dtype: see `choose_dtype`. If `auto` gives float16 and the model overflows in it, the model
            runs in float32.
        compile_mode: `auto` uses OpenVINO on a CPU if it is installed, has the dtype and agrees
            with torch, and compiles on CUDA. `on` compiles on a CPU, too. `off` is plain torch.
            If the compiler is missing or fails, the model runs uncompiled; the log and `compiled`
            show that. Unless `off`, on CUDA each launch size becomes a CUDA graph.
        max_batch: largest batch ever launched; None for the device's default.
        threads: threads that compute on the CPU; None: `compute_threads`, or one if a GPU computes.
        streams: batches computed at the same time; None for the device's default.
        launch_sizes: batch sizes to launch on CUDA, instead of `captured_sizes`; on a CPU only the
            largest counts, as `max_batch`.
        graphs: whether launch sizes become CUDA graphs on CUDA.
        transfer: whether transfer features have graphs, too; otherwise CUDA computes them
            uncompiled.
        ops: a device that batches are launched on instead of CUDA; for tests.
        keep: keeps the graphs of OpenVINO for a later start; None keeps none.
    """

    device: str
    device_name: str | None
    dtype: str
    compile_mode: CompileMode
    max_batch: int | None
    threads: int | None
    streams: int | None
    launch_sizes: Sequence[int] | None
    graphs: bool
    transfer: bool
    ops: DeviceOps | None
    keep: Keep | None


def may_overflow(checkpoint: Checkpoint, parts: Parts, options: PredictorOptions) -> bool:
    """Return whether the scores may overflow in the dtype, and the operator did not choose it.

    A library's network may not support a dtype; a Vision Transformer may overflow in float16.
    """
    risks = ("float16",) if isinstance(checkpoint.config, ViTConfig) else ("float16", "bfloat16")
    return options.get("dtype", "auto") == "auto" and parts.dtype in risks


def build(checkpoint: Checkpoint, options: PredictorOptions) -> Parts:
    """Build the parts of a predictor.

    Raises:
        DeviceError: the device or dtype is not available here, or its memory is too small.
        CheckpointError: the weights do not match the config.
    """
    device = choose_device(options.get("device", "auto"))
    dtype = choose_dtype(options.get("dtype", "auto"), device)
    is_cpu = device.type == "cpu"
    default = default_batch(largest_layer(checkpoint.config)) if is_cpu else _GPU_BATCH
    largest = options.get("max_batch") or default
    sizes = tuple(sorted(options.get("launch_sizes") or captured_sizes(largest)))
    count = options.get("threads")
    streams = options.get("streams")
    if not is_cpu:
        count = count or 1
        streams = streams or _GPU_STREAMS
    threads = ThreadPolicy(count, streams)
    torch.set_num_threads(threads.count)
    model = checkpoint.network()
    run = TorchOptions(
        model,
        checkpoint,
        device,
        dtype,
        options.get("compile_mode", "auto"),
        sizes,
        options.get("graphs", True),
        options.get("transfer", False),
    )
    parameters = count_parameters(model)
    ops = options.get("ops")
    if ops is None and not is_cpu:
        ops = CudaOps(device)
    backend: Backend
    if ops is not None:
        backend = Cuda(run, ops, streams=threads.streams)
        reason = "torch runs on GPUs"
    else:
        backend, reason = _cpu_backend(run, threads, parameters, options.get("keep"))
    return Parts(
        options.get("device_name") or str(device),
        run.dtype_name,
        None if is_cpu else gpu_identifier(device),
        parameters,
        sizes[-1],
        threads.streams,
        backend,
        reason,
    )


def _cpu_backend(
    run: TorchOptions, threads: ThreadPolicy, parameters: int, keep: Keep | None
) -> tuple[Backend, str]:
    """Return the backend for a CPU, and why it was chosen."""
    if run.compile_mode != "auto":
        return TorchCpu(run, threads), "torch is chosen"
    unsupported = unsupported_reason(run.dtype_name)
    if unsupported:
        return TorchCpu(run, threads), f"OpenVINO is not possible: {unsupported}"
    try:
        return _openvino(run, threads, parameters, keep), REASON
    except DeviceError as error:
        logger.warning("torch runs the network: %s", error)
        return TorchCpu(run, threads), str(error)


def _openvino(
    run: TorchOptions, threads: ThreadPolicy, parameters: int, keep: Keep | None
) -> OpenVino:
    """Return OpenVINO's backend.

    Raises:
        DeviceError: OpenVINO does not compute what torch does.
    """

    def network(model: TorchOptions, kind: GraphKind) -> OpenVinoNetwork:
        return traced_network(model, parameters, keep, kind, threads)

    def further_network(kind: GraphKind) -> OpenVinoNetwork:
        torch.set_num_threads(1)  # of the calling thread
        # Built from the checkpoint's own tensors, which are the constants of the first network's
        # graphs already.
        return network(replace(run, model=run.checkpoint.build()), kind)

    def torch_backend() -> TorchCpu:
        return TorchCpu(replace(run, compile_mode="off"), threads)

    backend = OpenVino(network(run, "plain"), threads, torch_backend, further_network)
    backend.load_torch()
    return backend
