"""How a torch network becomes a graph of OpenVINO, which is checked against torch's own outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.errors import DeviceError
from model.explanation.folded_weights import fold
from model.network.library import Classifier
from model.network.vit import VisionTransformer
from model.runtime.batches import BatchOutputs, BatchRequest
from model.runtime.openvino.graph import openvino_package
from model.runtime.openvino.network import REFERENCE_COUNT, NetworkGraph, OpenVinoNetwork, reference_images
from model.runtime.postprocess import on_host, run_network
from model.runtime.torch_backend import Normalise, TorchOptions

if TYPE_CHECKING:
    import openvino


def traced_network(
    options: TorchOptions,
    *,
    threads: int,
    streams: int,
    extras: BatchRequest = BatchRequest(),  # noqa: B008  frozen
    workers: int | None = None,
    stage: Callable[[NetworkGraph], NetworkGraph] | None = None,
) -> OpenVinoNetwork:
    """Return a torch network as one of OpenVINO, once its outputs were compared with torch's.

    Args:
        options: the model, which is read and not kept, and a dtype of `PRECISIONS`.
        threads, streams, workers: see `OpenVinoNetwork`.
        extras: what to compute beside logits and the last layer's attention row, see `BatchRequest.extras`.
        stage: returns the graph as it will be read when it is kept: it is compiled as that one will be.

    Raises:
        DeviceError: OpenVINO does not run this model, or gives other logits than torch, or torch's are not finite.
    """
    if workers == 1:
        torch.set_num_threads(1)  # of the calling thread
    graph = trace(options, extras)
    if stage is not None:
        graph = stage(graph)
    return OpenVinoNetwork(graph, options.dtype_name, threads=threads, streams=streams, workers=workers)


def trace(options: TorchOptions, extras: BatchRequest) -> NetworkGraph:
    """Return a network as a graph, in float32, with torch's own outputs for some images.

    Raises:
        DeviceError: OpenVINO does not read this model, or torch's scores are not finite.
    """
    config = options.model.config
    # A mean over the patch queries is made an image at a time, which a trace would fix to its own batch.
    layers: tuple[int, ...] = ()
    if isinstance(config, ViTConfig) and config.attention_source != "patch_mean":
        layers = (config.depth - 1,)
    request = BatchRequest(layers=layers, relevance=extras.relevance, all_tokens=extras.all_tokens)
    module = _Traced(options.model, Normalise(options.checkpoint.preprocess), request)
    images = reference_images(REFERENCE_COUNT, (*config.image_size, config.in_channels))
    with torch.inference_mode():
        expected = module.outputs(torch.from_numpy(images))
    if not expected.tensors()["logits"].isfinite().all():
        raise DeviceError("the model gives scores that are not finite")
    try:
        model = convert(module, torch.from_numpy(images[:2]))
    except RuntimeError as error:
        raise DeviceError(f"OpenVINO does not run this model: {str(error).strip().splitlines()[-1]}") from error
    return NetworkGraph(model, tuple(expected.tensors()), request, on_host(expected, REFERENCE_COUNT))


def convert(module: nn.Module, example: Tensor) -> openvino.Model:
    """Trace a module and translate it; the first axis of its input is then of any length."""
    openvino_package()
    from openvino import PartialShape  # noqa: PLC0415  an optional package
    from openvino.frontend import FrontEndManager  # noqa: PLC0415
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder  # noqa: PLC0415

    with warnings.catch_warnings(), torch.inference_mode(mode=False), torch.no_grad():
        # The warnings are of sizes that become constants, as all but the first may, and of tracing being deprecated.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        frontend = FrontEndManager().load_by_framework("pytorch")
        # The decoder has a name because the frontend reads it until the graph is made, but does not keep it.
        decoder = TorchScriptPythonDecoder(traced, example_input=(example,))
        graph = frontend.convert(frontend.load(decoder))
    graph.reshape({0: PartialShape([-1, *example.shape[1:]])})
    return graph


class _Traced(nn.Module):
    """The module that becomes the graph: normalisation, which OpenVINO fuses with what follows, and the network."""

    def __init__(self, model: Classifier, normalise: Normalise, request: BatchRequest) -> None:
        super().__init__()
        self.model = model
        self.normalise = normalise
        self.request = request
        self.folded = fold(model) if request.relevance and isinstance(model, VisionTransformer) else None

    def outputs(self, images: Tensor) -> BatchOutputs[Tensor]:
        return run_network(self.model, self.normalise(images), self.request, self.folded)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(images).tensors().values())
