"""The choice of the backend that runs the network."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from model.errors import DeviceError
from model.runtime.backend import Backend, BackendName
from model.runtime.batches import BatchRequest
from model.runtime.cpu import ThreadPolicy
from model.runtime.cuda.backend import Cuda
from model.runtime.cuda.batch_launcher import DeviceOps
from model.runtime.cuda.ops import CudaOps
from model.runtime.openvino.backend import LazyTorch, OpenVino, unsupported_reason
from model.runtime.openvino.network import NetworkGraph, OpenVinoNetwork
from model.runtime.openvino.tracing import traced_network
from model.runtime.scores import Scores
from model.runtime.torch_backend import TorchOptions
from model.runtime.torch_cpu import TorchCpu

logger = logging.getLogger(__name__)


def choose_backend(
    options: TorchOptions,
    requested: BackendName,
    *,
    threads: ThreadPolicy,
    streams: int,
    ops: DeviceOps | None = None,
    keep: Callable[[NetworkGraph, str], None] = lambda graph, reason: None,
) -> tuple[Backend, str]:
    """Return the backend and the reason: OpenVINO where it is requested, or is possible and torch is not to compile.

    Args:
        options: the network and how torch would run it.
        requested, threads, streams: see `model.runtime.predictor.Predictor`.
        keep: called with a graph of OpenVINO and the reason once it was made and compared, on some thread.
        ops: a device that batches are launched on; None launches on CUDA if that is the options' device.

    Raises:
        DeviceError: OpenVINO is requested and does not run this model, or the device's memory is too small.
    """
    if requested == "torch":
        reason = "torch is requested"
    elif requested == "auto" and options.compile_mode in ("on", "max"):
        reason = "torch is to compile the network"
    elif unsupported := unsupported_reason(str(options.device), options.dtype_name):
        if requested == "openvino":
            raise DeviceError(f"backend openvino: {unsupported}")
        reason = f"OpenVINO is not possible: {unsupported}"
    else:
        try:
            network, graph = traced_network(options, threads=threads.count, streams=streams)
        except DeviceError as error:
            if requested == "openvino":
                raise
            logger.warning("torch runs the network: %s", error)
            reason = str(error)
        else:
            if requested == "auto":
                why = "OpenVINO is installed, has the dtype and agrees with torch"
            else:
                why = "OpenVINO is requested"
            torchs = TorchCpu(replace(options, compile_mode="off"), threads)

            def with_extras(extras: BatchRequest) -> OpenVinoNetwork:
                # Of the checkpoint's own tensors, which are the constants of the first network's graphs already.
                built = replace(options, model=options.checkpoint.build())
                extended, graph = traced_network(
                    built, threads=threads.count, streams=streams, extras=extras, workers=1
                )
                keep(graph, why)
                return extended

            fallback = LazyTorch(lambda: torchs)
            fallback.load()
            keep_plain = partial(keep, graph, why)
            return OpenVino(network, Scores(options.checkpoint), threads, fallback, with_extras, keep_plain), why
    if ops is None and options.device.type == "cuda":
        ops = CudaOps(options.device)
    if ops is None:
        return TorchCpu(options, threads), reason
    return Cuda(options, ops, streams=streams), reason
