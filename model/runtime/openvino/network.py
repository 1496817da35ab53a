"""A network as graphs of OpenVINO, checked against torch when they are made."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.config import ViTConfig
from model.errors import DeviceError
from model.explanation.folded_weights import fold
from model.network.library import Classifier, meta_network
from model.network.vit import VisionTransformer
from model.runtime.backend import require_close
from model.runtime.batches import UNCUT, BatchOutputs, BatchRequest
from model.runtime.openvino.graph import Requests, compile_sizes, convert
from model.runtime.postprocess import run_network
from model.runtime.torch_backend import Normalise, TorchOptions

_SIZES: Final = (1, 2, 3, 4, 6, 8)
"""What a small network has graphs for; 5 as 4 and 1, and 7 as 6 and 1, take hardly longer than in one of their own."""

_FIXED_BYTES: Final = 240 << 20
"""What these graphs may take together, more or less; those for a batch that is alone come on top, and with relevance
there are as many again."""

_GRAPH_BYTES: Final = 7 << 20
"""What a graph for one size takes beside its weights, about: kernels, and descriptions of its operations."""

_STREAM_BYTES: Final = 3 << 20
"""What each of its streams adds."""


class OpenVinoNetwork:
    """Computes logits and the last layer's attention row of any number of images, for several callers at once.

    A small network has a graph for each of a few numbers of images. These are faster than a graph for any number, and
    most where numbers change from batch to batch, but take more memory. A batch that is alone, which is small or rare,
    has a graph for a single image and one for any number.

    Args:
        options: the model, which is read and not kept, and a dtype of `PRECISIONS`.
        threads: of a batch that is alone.
        streams: batches that compute at the same time, on a share of the threads each.
        extras: what to compute beside logits and the attention row, see `BatchRequest.extras`.
        workers: threads that compile.

    Attributes:
        request: what the graphs give: `extras`, and the last layer's attention row where it can be traced.

    Raises:
        DeviceError: OpenVINO does not run this model, or gives other logits than torch, or torch's are not finite.
    """

    def __init__(
        self,
        options: TorchOptions,
        *,
        threads: int,
        streams: int,
        extras: BatchRequest = BatchRequest(),  # noqa: B008  frozen
        workers: int | None = None,
    ) -> None:
        config, dtype = options.model.config, options.dtype
        self._options, self._threads, self._streams = replace(options, model=meta_network(config)), threads, streams
        # A mean over the patch queries is made an image at a time, which a trace would fix to its own batch.
        layers: tuple[int, ...] = ()
        if isinstance(config, ViTConfig) and config.attention_source != "patch_mean":
            layers = (config.depth - 1,)
        self.request = replace(extras, layers=layers)
        self._is_small = _is_small(options.model, dtype, streams)
        self.version = importlib.metadata.version("openvino")
        traced = _Traced(options.model, Normalise(options.checkpoint.preprocess), self.request)
        rows, columns = config.image_size
        checked = _SIZES if self._is_small else (1, 3)
        shape = (max(3, *checked), rows, columns, config.in_channels)
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        with torch.inference_mode():
            expected = traced.outputs(torch.from_numpy(images))
        self._names = tuple(expected.tensors())
        if not expected.tensors()["logits"].isfinite().all():
            raise DeviceError("the model gives scores that are not finite")
        compiled = partial(compile_sizes, threads=threads, workers=workers or threads)
        try:
            graph = convert(traced, torch.from_numpy(images[:2]))
            self._beside = compiled(graph, dtype, _SIZES if self._is_small else [None], streams=streams)
            # One stream is on all threads already.
            lone = [1, None] if self._is_small else [None]
            self._alone = self._beside if streams == 1 else compiled(graph, dtype, lone, streams=1)
            # With one image, and with other numbers than traced, a constant that the trace made of a size shows.
            self._check(images, expected, (1, 3), alone=True)
            self._check(images, expected, checked, alone=False)
        except RuntimeError as error:
            raise DeviceError(f"OpenVINO does not run this model: {str(error).strip().splitlines()[-1]}") from error

    def _check(
        self, images: NDArray[np.uint8], expected: BatchOutputs, counts: tuple[int, ...], *, alone: bool
    ) -> None:
        """Raise DeviceError if the outputs of the first images are not torch's."""
        for count in counts:
            require_close(self(images[:count], alone=alone), expected, self._options.dtype, "OpenVINO")

    def with_extras(self, extras: BatchRequest) -> OpenVinoNetwork:
        """Return a network that computes `extras`, too, compiled on one thread; raises DeviceError.

        It is made of the checkpoint's own tensors, which are the constants of this network's graphs already.
        """
        options = replace(self._options, model=self._options.checkpoint.build())
        return OpenVinoNetwork(options, threads=self._threads, streams=self._streams, extras=extras, workers=1)

    def __call__(self, images: NDArray[np.uint8], *, alone: bool) -> BatchOutputs:
        """Compute a batch uint8 [B, H, W, C], on all threads if no other computes; block while all streams are busy.

        Args:
            images: as many as one of `sizes`.

        Returns:
            What `request` asks for.

        Raises:
            RuntimeError: as OpenVINO raises it.
        """
        requests = _for(len(images), self._alone if alone else self._beside)
        outputs = (torch.from_numpy(output) for output in requests.infer(np.ascontiguousarray(images)))
        return BatchOutputs.of(dict(zip(self._names, outputs, strict=True)))

    def sizes(self, *, alone: bool) -> tuple[int, ...] | None:
        """Return the numbers of images that a batch may have; None for any."""
        if not self._is_small:
            return None
        return tuple(range(1, UNCUT + 1)) if alone and self._streams > 1 else _SIZES

    def fill_caches(self, images: NDArray[np.uint8]) -> None:
        """Run a batch on every stream: each keeps kernels and buffers of its own for a batch size."""
        for alone in (True, False) if self._streams > 1 else (False,):
            sizes = self.sizes(alone=alone)
            if sizes is None or len(images) in sizes:
                _for(len(images), self._alone if alone else self._beside).run_all(images)


def _is_small(model: Classifier, dtype: torch.dtype, streams: int) -> bool:
    """Return whether graphs for each size of a piece have room."""
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return len(_SIZES) * (weights + _GRAPH_BYTES + streams * _STREAM_BYTES) <= _FIXED_BYTES


def _for(count: int, requests: dict[int | None, Requests]) -> Requests:
    return requests.get(count) or requests[None]


class _Traced(nn.Module):
    """The module that becomes the graph: normalisation, which OpenVINO fuses with what follows, and the network."""

    def __init__(self, model: Classifier, normalise: Normalise, request: BatchRequest) -> None:
        super().__init__()
        self.model = model
        self.normalise = normalise
        self.request = request
        self.folded = fold(model) if request.relevance and isinstance(model, VisionTransformer) else None

    def outputs(self, images: Tensor) -> BatchOutputs:
        return run_network(self.model, self.normalise(images), self.request, self.folded)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(images).tensors().values())
