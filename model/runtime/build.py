"""How a predictor's parts are made of a checkpoint with torch: device, dtype, network and backend."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypedDict

import torch

from model.checkpoint import Checkpoint
from model.config import ViTConfig
from model.cores import compute_threads
from model.errors import DeviceError
from model.network.library import largest_layer
from model.network.vit import count_parameters
from model.runtime.backend import (
    Backend,
    CompileMode,
    GraphKind,
    Parts,
    ThreadPolicy,
    captured_sizes,
)
from model.runtime.cpu import default_batch, default_streams
from model.runtime.cuda.backend import Cuda
from model.runtime.cuda.batch_launcher import DeviceOps
from model.runtime.cuda.ops import CudaOps
from model.runtime.device import choose_device, choose_dtype, gpu_identifier
from model.runtime.openvino.backend import REASON, OpenVino, OpenVinoNetwork, unsupported_reason
from model.runtime.openvino.kept import Keep
from model.runtime.openvino.tracing import traced_network
from model.runtime.torch_backend import TorchCpu, TorchOptions

logger = logging.getLogger(__name__)

# Where none are chosen: one batch is uploaded, or its answer read, while the other computes.
_GPU_STREAMS: Final = 2

# Largest batch where none is chosen; `benchmarks.gpu` measures which one is best.
_GPU_BATCH: Final = 64


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
    transfer: bool
    ops: DeviceOps | None
    keep: Keep | None


def may_overflow(checkpoint: Checkpoint, parts: Parts, options: PredictorOptions) -> bool:
    """Return whether the dtype was chosen here, and the network may have scores in it that are not
    finite.

    A library's network may do without a dtype, a Vision Transformer overflow in float16.
    """
    risks = ("float16",) if isinstance(checkpoint.config, ViTConfig) else ("float16", "bfloat16")
    return options.get("dtype", "auto") == "auto" and parts.dtype in risks


def build(checkpoint: Checkpoint, options: PredictorOptions) -> Parts:
    """Return the parts of a predictor.

    Raises:
        DeviceError: the device or dtype is not available here, or its memory is too small.
        CheckpointError: the weights are not what the config says.
    """
    device, ops = choose_device(options.get("device", "auto")), options.get("ops")
    dtype = choose_dtype(options.get("dtype", "auto"), device)
    on_cpu = device.type == "cpu"
    default = default_batch(largest_layer(checkpoint.config)) if on_cpu else _GPU_BATCH
    sizes = tuple(
        sorted(options.get("launch_sizes") or captured_sizes(options.get("max_batch") or default))
    )
    threads = ThreadPolicy(options.get("threads") or (compute_threads() if on_cpu else 1))
    torch.set_num_threads(threads.count)
    streams = options.get("streams") or (default_streams(threads.count) if on_cpu else _GPU_STREAMS)
    model, mode, graphs = (
        checkpoint.network(),
        options.get("compile_mode", "auto"),
        options.get("graphs", True),
    )
    parameters = count_parameters(model)
    run = TorchOptions(
        model, checkpoint, device, dtype, mode, sizes, graphs, options.get("transfer", False)
    )
    if ops is None and not on_cpu:
        ops = CudaOps(device)
    backend: Backend
    if ops is not None:
        backend, reason = Cuda(run, ops, streams=streams), "torch runs on GPUs"
    elif mode != "auto":
        backend, reason = TorchCpu(run, threads), "torch is chosen"
    elif unsupported := unsupported_reason(run.dtype_name):
        backend, reason = TorchCpu(run, threads), f"OpenVINO is not possible: {unsupported}"
    else:
        try:
            backend, reason = (
                _openvino(run, threads, streams, parameters, options.get("keep")),
                REASON,
            )
        except DeviceError as error:
            logger.warning("torch runs the network: %s", error)
            backend, reason = TorchCpu(run, threads), str(error)
    name, gpu = (
        options.get("device_name") or str(device),
        None if on_cpu else gpu_identifier(device),
    )
    return Parts(name, run.dtype_name, gpu, parameters, sizes[-1], streams, backend, reason)


def _openvino(
    run: TorchOptions, threads: ThreadPolicy, streams: int, parameters: int, keep: Keep | None
) -> OpenVino:
    """Return the backend; raises DeviceError where OpenVINO does not compute what torch does."""

    def network(model: TorchOptions, kind: GraphKind) -> OpenVinoNetwork:
        return traced_network(model, parameters, keep, kind, threads=threads.count, streams=streams)

    def further(kind: GraphKind) -> OpenVinoNetwork:
        torch.set_num_threads(1)  # of the calling thread
        # Of the checkpoint's own tensors, which are the constants of the first network's graphs
        # already.
        return network(replace(run, model=run.checkpoint.build()), kind)

    plain = network(run, "plain")
    made = OpenVino(
        plain,
        run.checkpoint.head,
        threads,
        lambda: TorchCpu(replace(run, compile_mode="off"), threads),
        further,
    )
    made.load_torch()
    return made
