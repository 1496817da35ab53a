"""How a torch network becomes a graph of OpenVINO, which is checked against torch's own outputs."""

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
from model.runtime.backend import BatchOutputs, BatchRequest, GraphKind, noise_images
from model.runtime.openvino.backend import (
    REFERENCE_COUNT,
    NetworkGraph,
    OpenVinoNetwork,
    openvino_package,
)
from model.runtime.torch_backend import TorchOptions
from model.runtime.torch_pass import Normalise, on_host, run_network

if TYPE_CHECKING:
    import openvino

    from model.runtime.openvino.kept import Keep

# Sizes become constants, as all but the first may; and tracing is deprecated. Set once and for all,
# as a context that ignores warnings is of all threads: its end in another one would end it while a
# graph is traced.
warnings.filterwarnings("ignore", category=TracerWarning)
warnings.filterwarnings("ignore", module=r"torch\.jit")


def trace(options: TorchOptions, kind: GraphKind = "plain") -> NetworkGraph:
    """Return a network as a graph, in float32, with torch's own outputs for some images.

    Args:
        options: the model, which is read and not kept.
        kind: what to compute beside logits, embeddings and the last layer's attention row.

    Raises:
        DeviceError: OpenVINO does not read this model, or torch's scores are not finite.
    """
    config = options.model.config
    request = BatchRequest.of_graph(kind, config)
    module = _Traced(options.model, Normalise(options.checkpoint.preprocess), request)
    images = noise_images(REFERENCE_COUNT, (*config.image_size, config.in_channels))
    with torch.inference_mode():
        expected = module.outputs(torch.from_numpy(images))
    if not expected.tensors()["logits"].isfinite().all():
        raise DeviceError("the model gives scores that are not finite")
    try:
        model = convert(module, torch.from_numpy(images[:2]))
    except RuntimeError as error:
        raise DeviceError(
            f"OpenVINO does not run this model: {str(error).strip().splitlines()[-1]}"
        ) from error
    return NetworkGraph(model, tuple(expected.tensors()), request, on_host(expected))


def traced_network(
    options: TorchOptions,
    parameters: int,
    keep: Keep | None,
    kind: GraphKind,
    *,
    threads: int,
    streams: int,
) -> OpenVinoNetwork:
    """Return a network whose graph is traced now, and kept.

    Args:
        parameters: how many the model has.
        keep: keeps the graph; None keeps none.

    Raises:
        DeviceError: as `trace` and `OpenVinoNetwork`.
    """
    graph = trace(options, kind)
    if keep is not None:
        graph = keep(graph, options.checkpoint, parameters, options.dtype_name)
    try:
        return OpenVinoNetwork(graph, options.dtype_name, threads=threads, streams=streams)
    except DeviceError:
        if keep is not None:
            keep.entry.remove(kind)
        raise


def convert(module: nn.Module, example: Tensor) -> openvino.Model:
    """Trace a module and translate it; the first axis of its input is then of any length."""
    openvino_package()
    from openvino import PartialShape  # noqa: PLC0415  an optional package
    from openvino.frontend import FrontEndManager  # noqa: PLC0415
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder  # noqa: PLC0415

    with torch.inference_mode(mode=False), torch.no_grad():
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        frontend = FrontEndManager().load_by_framework("pytorch")
        # The decoder has a name because the frontend reads it until the graph is made, but does not
        # keep it.
        decoder = TorchScriptPythonDecoder(traced, example_input=(example,))
        graph = frontend.convert(frontend.load(decoder))
    graph.reshape({0: PartialShape([-1, *example.shape[1:]])})
    return graph


class _Traced(nn.Module):
    """The module that becomes the graph: normalisation, which OpenVINO fuses with what follows, and
    the network.
    """

    def __init__(self, model: Classifier, normalise: Normalise, request: BatchRequest) -> None:
        super().__init__()
        self.model = model
        self.normalise = normalise
        self.request = request
        self.folded = (
            fold(model) if request.relevance and isinstance(model, VisionTransformer) else None
        )

    def outputs(self, images: Tensor) -> BatchOutputs[Tensor]:
        return run_network(self.model, self.normalise(images), self.request, self.folded)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(images).tensors().values())
