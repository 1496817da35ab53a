"""The choice of the backend that runs the network."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

from model.errors import DeviceError
from model.runtime.backend import Backend
from model.runtime.batches import BatchRequest
from model.runtime.cuda.backend import Cuda
from model.runtime.cuda.batch_launcher import DeviceOps
from model.runtime.cuda.ops import CudaOps
from model.runtime.openvino.backend import OpenVino, unsupported_reason
from model.runtime.openvino.network import NetworkGraph, OpenVinoNetwork
from model.runtime.openvino.tracing import traced_network
from model.runtime.torch_backend import TorchOptions
from model.runtime.torch_cpu import ThreadPolicy, TorchCpu

logger = logging.getLogger(__name__)

BackendName = Literal["auto", "torch", "openvino"]


def choose_backend(
    options: TorchOptions,
    requested: BackendName,
    *,
    threads: ThreadPolicy,
    streams: int,
    ops: DeviceOps | None = None,
    int8: NetworkGraph | None = None,
) -> tuple[Backend, str]:
    """Return the backend and the reason: OpenVINO where it is requested, or is possible and torch is not to compile.

    Args:
        options: the network and how torch would run it.
        requested, threads, streams: see `model.runtime.predictor.Predictor`.
        int8: the network's logits as a graph in int8, which needs OpenVINO.
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
            network = traced_network(options, threads=threads.count, streams=streams)
            classifier = None
            if int8 is not None:
                classifier = OpenVinoNetwork(int8, options.dtype_name, threads=threads.count, streams=streams)
        except DeviceError as error:
            if requested == "openvino" or int8 is not None:
                raise
            logger.warning("torch runs the network: %s", error)
            reason = str(error)
        else:
            agrees = "OpenVINO is installed, has the dtype and agrees with torch"
            fallback = TorchCpu(replace(options, compile_mode="off"), threads)

            def with_extras(extras: BatchRequest) -> OpenVinoNetwork:
                # Of the checkpoint's own tensors, which are the constants of the first network's graphs already.
                built = replace(options, model=options.checkpoint.build())
                return traced_network(built, threads=threads.count, streams=streams, extras=extras, workers=1)

            reason = "OpenVINO is requested" if requested == "openvino" else agrees
            return OpenVino(network, fallback, with_extras, classifier), reason
    if ops is None and options.device.type == "cuda":
        ops = CudaOps(options.device)
    if ops is None:
        return TorchCpu(options, threads), reason
    return Cuda(options, ops, streams=streams), reason
