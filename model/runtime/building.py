"""How a predictor's parts are made of a checkpoint with torch: device, dtype, network, and the chosen backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypedDict

import torch

from model.checkpoint import Checkpoint
from model.config import ViTConfig
from model.errors import DeviceError, NewProcessNeeded, first_line
from model.network.vit import VisionTransformer, count_parameters
from model.runtime.backend import Backend, BackendName, Built, CompileMode, batch_too_large
from model.runtime.batches import BatchRequest, captured_sizes, powers_of_two
from model.runtime.cpu import ThreadPolicy
from model.runtime.cuda.backend import Cuda
from model.runtime.cuda.batch_launcher import DeviceOps
from model.runtime.cuda.ops import CudaOps
from model.runtime.device import choose_device, choose_dtype, gpu_identifier
from model.runtime.float8 import CALIBRATION_SET, LEAST_AGREEMENT, agreement, calibration_images
from model.runtime.int8 import TorchReference, chosen_graph, require_same_model
from model.runtime.openvino.backend import LazyTorch, OpenVino, unsupported_reason
from model.runtime.openvino.network import NetworkGraph, OpenVinoNetwork
from model.runtime.openvino.store import Keep, MadeOf
from model.runtime.openvino.tracing import traced_network
from model.runtime.scores import Scores
from model.runtime.torch_backend import TorchOptions
from model.runtime.torch_cpu import TorchCpu

logger = logging.getLogger(__name__)

_CALIBRATION_BATCH: Final = 16
"""Small: its memory is taken before that of the largest batch."""

_DEFAULT_STREAMS: Final = 2
"""On a GPU, one batch is uploaded, or its answer read, while the other computes."""

DEFAULT_MAX_BATCH: Final = {"cpu": 32, "cuda": 64}
"""Largest batch where none is chosen; on a GPU, `benchmarks.gpu` measures which one is best."""

_DEFAULT_THREADS: Final = {"cpu": None, "cuda": 1}
"""Torch's threads on the CPU; beside a GPU there is little for them to do, and they would take cores from decoders."""


class PredictorOptions(TypedDict, total=False):
    """How a predictor runs its model; what is left out is chosen for the device.

    Attributes:
        device: see `model.runtime.device.choose_device`.
        device_name: what the device is called, where it has another number in this process.
        dtype: see `model.runtime.device.choose_dtype`. Where `auto` gives float16, and the model overflows in it, the
            model runs in float32. With `float8` the best class is compared with bfloat16's on a calibration set. A
            checkpoint that has a graph in int8 beside it is served with it in `auto`, too, where it agrees.
        least_agreement: share of that set on which they must agree, 0...1; with int8, of the pictures on which
            `vitserve convert` measured it.
        compile_mode: `auto` compiles on CUDA; `on` also on the CPU; `max` times several kernels for every
            matrix product first, which takes minutes. If the compiler is missing or fails, that is logged and shown by
            `compiled`, and the model runs uncompiled. Unless `off`, on CUDA each launch size becomes a CUDA graph.
        backend: what runs the network: `torch`; `openvino`, on a CPU; or `auto`, which is OpenVINO where it is
            installed, has the dtype and agrees with torch, unless torch is to compile.
        max_batch: largest batch ever launched; None for the device's default.
        threads: threads that compute on the CPU; None leaves torch's choice.
        streams: batches under way at the same time; None for the device's default.
        graphs: whether launch sizes become CUDA graphs, where they do.
        launch_sizes: the batch sizes to compile for, instead of powers of two, or finer ones on CUDA; the largest is
            `max_batch`.
        ops: a device that batches are launched on in CUDA's place; for tests.
        keep: keeps the graphs of OpenVINO for a later start; None keeps none.
    """

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
        dtype, ops = options.get("dtype", "auto"), options.get("ops")
        compile_mode, backend = options.get("compile_mode", "auto"), options.get("backend", "auto")
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
        max_batch = options.get("max_batch") or DEFAULT_MAX_BATCH[self._device.type]
        self._sizes = tuple(sorted(options.get("launch_sizes") or sizes_up_to(max_batch)))
        if threads := options.get("threads") or _DEFAULT_THREADS[self._device.type]:
            torch.set_num_threads(threads)
        self._threads = ThreadPolicy(torch.get_num_threads())
        self._streams = options.get("streams") or (
            min(_DEFAULT_STREAMS, self._threads.count) if on_cpu else _DEFAULT_STREAMS
        )
        least = options.get("least_agreement")
        self._least = LEAST_AGREEMENT if least is None else least
        self._compile_mode, self._backend, self._ops = compile_mode, backend, ops
        self._graphs = options.get("graphs", True)
        self._int8 = chosen_graph(checkpoint, self._device, dtype, backend, compile_mode, self._least)
        self._may_do_without = dtype == "auto"
        self._keep = options.get("keep") if self._int8 is None else None
        # A library's network may do without a dtype, a Vision Transformer overflow in float16.
        risks = (torch.float16,) if is_vit else (torch.float16, torch.bfloat16)
        self.may_overflow = dtype == "auto" and self._dtype in risks

    def build_in_float32(self) -> Built:
        """Return what `build` does, in float32."""
        self._dtype = torch.float32
        return self.build()

    def build(self) -> Built:
        """Return the parts of a predictor; where the graph in int8 was not asked for and does not run, without it.

        Raises: see `_build`.
        """
        try:
            return self._build()
        except DeviceError as error:
            if self._int8 is None or not self._may_do_without or isinstance(error, NewProcessNeeded):
                raise
            logger.warning("the graph in int8 is not used: %s", error)
            self._int8 = None
            return self._build()

    def _build(self) -> Built:
        """Return the parts of a predictor.

        Raises:
            DeviceError: the backend is not available here, or float8 agrees too seldom with bfloat16, or the graph in
                int8 is another model's.
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
            int8=None if self._int8 is None else self._int8.graph,
        )
        agrees, reference = None, None
        if self._int8 is not None:
            agrees, reference = self._int8.agreement, TorchReference(self._checkpoint)
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


def choose_backend(
    options: TorchOptions,
    requested: BackendName,
    *,
    threads: ThreadPolicy,
    streams: int,
    ops: DeviceOps | None = None,
    keep: Keep | None = None,
    int8: NetworkGraph | None = None,
) -> tuple[Backend, str]:
    """Return the backend and the reason: OpenVINO where it is requested, or is possible and torch is not to compile.

    Args:
        options: the network and how torch would run it.
        requested, threads, streams: see `model.runtime.predictor.Predictor`.
        keep: keeps graphs of OpenVINO that were made and compared.
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
        parameters = count_parameters(options.model)
        stage = None if keep is None else keep.stage
        try:
            network = traced_network(options, threads=threads.count, streams=streams, stage=stage)
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
            why = "OpenVINO is requested" if requested == "openvino" else agrees
            torchs = TorchCpu(replace(options, compile_mode="off"), threads)
            made_of = MadeOf(parameters, options.dtype_name, threads.count, streams, options.sizes[-1], why)

            def save(extras: BatchRequest = BatchRequest()) -> None:  # noqa: B008  frozen
                if keep is not None:
                    keep.save(extras, options.checkpoint, made_of)

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
            return OpenVino(network, scores, threads, fallback, with_extras, save, classifier), why
    if ops is None and options.device.type == "cuda":
        ops = CudaOps(options.device)
    if ops is None:
        return TorchCpu(options, threads), reason
    return Cuda(options, ops, streams=streams), reason
