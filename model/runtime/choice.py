"""The choice of the backend that runs the network."""

from __future__ import annotations

import logging
from dataclasses import replace

from model.errors import DeviceError
from model.network.vit import count_parameters
from model.runtime.backend import Backend
from model.runtime.batches import BatchRequest
from model.runtime.cpu import ThreadPolicy
from model.runtime.cuda.backend import Cuda
from model.runtime.cuda.batch_launcher import DeviceOps
from model.runtime.cuda.ops import CudaOps
from model.runtime.openvino.backend import REASON, LazyTorch, OpenVino, unsupported_reason
from model.runtime.openvino.network import OpenVinoNetwork
from model.runtime.openvino.store import Keep
from model.runtime.openvino.tracing import traced_network
from model.runtime.scores import Scores
from model.runtime.torch_backend import TorchOptions
from model.runtime.torch_cpu import TorchCpu

logger = logging.getLogger(__name__)


def choose_backend(
    options: TorchOptions,
    *,
    threads: ThreadPolicy,
    streams: int,
    ops: DeviceOps | None = None,
    keep: Keep | None = None,
) -> tuple[Backend, str]:
    """Return the backend and the reason: with `auto` OpenVINO where it runs the network, else torch.

    Args:
        options: the network and how torch would run it.
        threads, streams: see `model.runtime.predictor.Predictor`.
        keep: keeps graphs of OpenVINO that were made and compared.
        ops: a device that batches are launched on; None launches on CUDA if that is the options' device.

    Raises:
        DeviceError: the device's memory is too small.
    """
    if ops is not None or options.compile_mode != "auto":
        reason = "torch is chosen"
    elif unsupported := unsupported_reason(str(options.device), options.dtype_name):
        reason = f"OpenVINO is not possible: {unsupported}"
    else:
        parameters = count_parameters(options.model)
        stage = None if keep is None else keep.stage
        try:
            network = traced_network(options, threads=threads.count, streams=streams, stage=stage)
        except DeviceError as error:
            logger.warning("torch runs the network: %s", error)
            reason = str(error)
        else:
            torchs = TorchCpu(replace(options, compile_mode="off"), threads)

            def save(extras: BatchRequest = BatchRequest()) -> None:  # noqa: B008  frozen
                if keep is not None:
                    keep.save(extras, options.checkpoint, parameters, options.dtype_name)

            def with_extras(extras: BatchRequest) -> OpenVinoNetwork:
                # Of the checkpoint's own tensors, which are the constants of the first network's graphs already.
                built = replace(options, model=options.checkpoint.build())
                extended = traced_network(
                    built, threads=threads.count, streams=streams, extras=extras, workers=1, stage=stage
                )
                save(extras)
                return extended

            fallback = LazyTorch(lambda: torchs)
            fallback.load()
            scores = Scores(options.checkpoint)
            return OpenVino(network, scores, threads, fallback, with_extras, save), REASON
    if ops is None and options.device.type == "cuda":
        ops = CudaOps(options.device)
    if ops is None:
        return TorchCpu(options, threads), reason
    return Cuda(options, ops, streams=streams), reason
