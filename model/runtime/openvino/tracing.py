"""Turns a torch network into a graph of OpenVINO, with torch's own outputs to compare with."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.jit import TracerWarning  # type: ignore[attr-defined]  # it does not say that it exports it

from model.errors import DeviceError
from model.explanation.folded_weights import fold
from model.network.library import Classifier
from model.network.vit import VisionTransformer
from model.runtime.batch_request import BatchRequest, GraphKind
from model.runtime.cpu import ThreadPolicy
from model.runtime.openvino.network import (
    REFERENCE_COUNT,
    NetworkGraph,
    OpenVinoNetwork,
    does_not_run,
    openvino_package,
)
from model.runtime.torch_backend import TorchOptions
from model.runtime.torch_pass import DeviceOutputs, Normalise, on_host, run_network
from model.runtime.trial import noise_images

if TYPE_CHECKING:
    import openvino

    from model.runtime.openvino.kept import Keep

# Tracing warns that it is deprecated, and that sizes become constants, which is intended for all
# axes but the first. These filters stay, because a context that ignores warnings belongs to all
# threads: it could end in another thread while a graph is traced.
warnings.filterwarnings("ignore", category=TracerWarning)
warnings.filterwarnings("ignore", module=r"torch\.jit")


def trace(options: TorchOptions, kind: GraphKind = "plain") -> NetworkGraph:
    """Trace a network into a graph, in float32, with torch's own outputs for some images.

    Args:
        options: the model, to which the graph keeps no reference.
        kind: the outputs besides logits, embeddings and the last layer's attention row.

    Raises:
        DeviceError: OpenVINO does not read this model, or torch's scores are not finite.
    """
    config = options.model.config
    request = BatchRequest.of_graph(kind, config)
    module = _Traced(options.model, Normalise(options.checkpoint.preprocess), request)
    images = noise_images(REFERENCE_COUNT, (*config.image_size, config.in_channels))
    with torch.inference_mode():
        expected = module.outputs(torch.from_numpy(images))
    if not expected["logits"].isfinite().all():
        raise DeviceError("the model's scores are not finite")
    try:
        model = convert(module, torch.from_numpy(images[:2]))
    except RuntimeError as error:
        raise does_not_run(error) from error
    return NetworkGraph(model, tuple(expected), request, on_host(expected))


def traced_network(
    options: TorchOptions,
    parameters: int,
    keep: Keep | None,
    kind: GraphKind,
    threads: ThreadPolicy,
) -> OpenVinoNetwork:
    """Build a network whose graph is traced now, and keep the graph.

    Args:
        options: the model.
        parameters: number of the model's parameters.
        keep: keeps the graph; None does not keep it.
        kind: see `trace`.
        threads: see `OpenVinoNetwork`.

    Raises:
        DeviceError: from `trace` or `OpenVinoNetwork`.
    """
    graph = trace(options, kind)
    if keep is not None:
        graph = keep(graph, options.checkpoint, parameters, options.dtype_name)
    try:
        return OpenVinoNetwork(graph, options.dtype_name, threads)
    except DeviceError:
        if keep is not None:
            keep.entry.remove(kind)
        raise


def convert(module: nn.Module, example: Tensor) -> openvino.Model:
    """Trace a module and translate it, so that the first axis of its input has any length."""
    openvino_package()
    from openvino import PartialShape  # noqa: PLC0415  an optional package
    from openvino.frontend import FrontEndManager  # noqa: PLC0415
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder  # noqa: PLC0415

    with torch.inference_mode(mode=False), torch.no_grad():
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        frontend = FrontEndManager().load_by_framework("pytorch")
        # The decoder needs a name: the frontend reads it until the graph is built, but does not
        # hold it.
        decoder = TorchScriptPythonDecoder(traced, example_input=(example,))
        graph = frontend.convert(frontend.load(decoder))
    graph.reshape({0: PartialShape([-1, *example.shape[1:]])})
    return graph


class _Traced(nn.Module):
    """The module that becomes the graph: the network after normalisation, which OpenVINO fuses."""

    def __init__(self, model: Classifier, normalise: Normalise, request: BatchRequest) -> None:
        super().__init__()
        self.model = model
        self.normalise = normalise
        self.request = request
        self.folded = None
        if request.relevance and isinstance(model, VisionTransformer):
            self.folded = fold(model)

    def outputs(self, images: Tensor) -> DeviceOutputs:
        return run_network(self.model, self.normalise(images), self.request, self.folded)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(images).values())
