"""A network as graphs of OpenVINO, each compiled for a batch size; wherever its graph comes from."""

from __future__ import annotations

import importlib.metadata
import math
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.errors import DeviceError
from model.runtime.backend import require_close
from model.runtime.batches import UNCUT, BatchOutputs, BatchRequest, HostOutputs
from model.runtime.openvino.graph import Requests, compile_sizes

if TYPE_CHECKING:
    import openvino

_SIZES: Final = (1, 2, 3, 4, 6, 8)
"""What a small network has graphs for; 5 as 4 and 1, and 7 as 6 and 1, take hardly longer than in one of their own."""

_FIXED_BYTES: Final = 240 << 20
"""What these graphs may take together, more or less; those for a batch that is alone come on top, and with relevance
there are as many again."""

_GRAPH_BYTES: Final = 7 << 20
"""What a graph for one size takes beside its weights, about: kernels, and descriptions of its operations."""

_STREAM_BYTES: Final = 3 << 20
"""What each of its streams adds."""


class NetworkGraph(NamedTuple):
    """A network as a graph of OpenVINO.

    Attributes:
        model: takes images, uint8 [B, H, W, C] with B of any number, and normalises them itself; its outputs are
            float32.
        outputs: their names, in the model's order: of `BatchOutputs`.
        request: what they are: the last layer's attention row where it is given, and extras.
    """

    model: openvino.Model
    outputs: tuple[str, ...]
    request: BatchRequest


class Reference(NamedTuple):
    """Torch's own outputs for images, uint8 [B, H, W, C]: for as many as the largest graph of one size takes."""

    images: NDArray[np.uint8]
    outputs: HostOutputs


class OpenVinoNetwork:
    """Computes logits and the last layer's attention row of any number of images, for several callers at once.

    A small network has a graph for each of a few numbers of images. These are faster than a graph for any number, and
    most where numbers change from batch to batch, but take more memory. A batch that is alone, which is small or rare,
    has a graph for a single image and one for any number.

    Args:
        graph: the network, in float32: OpenVINO rounds to the dtype itself.
        dtype: of `PRECISIONS`.
        threads: of a batch that is alone.
        streams: batches that compute at the same time, on a share of the threads each.
        workers: threads that compile.

    Attributes:
        dtype: what it computes in, of `PRECISIONS`.
        request: what the graphs give: extras, and the last layer's attention row where it can be traced.

    Raises:
        DeviceError: OpenVINO does not compile this graph.
    """

    def __init__(
        self, graph: NetworkGraph, dtype: str, *, threads: int, streams: int, workers: int | None = None
    ) -> None:
        self.version = importlib.metadata.version("openvino")
        self.request = graph.request
        self.dtype = dtype
        self._names, self._streams = graph.outputs, streams
        self._is_small = _is_small(weights_bytes(graph.model, dtype), streams)
        compiled = partial(compile_sizes, graph.model, dtype, threads=threads, workers=workers or threads)
        try:
            self._beside = compiled(_SIZES if self._is_small else [None], streams=streams)
            # One stream is on all threads already.
            lone = [1, None] if self._is_small else [None]
            self._alone = self._beside if streams == 1 else compiled(lone, streams=1)
        except RuntimeError as error:
            raise _does_not_run(error) from error

    def require_close(self, reference: Reference) -> None:
        """Raise DeviceError if a graph does not run, or its outputs are not torch's."""
        try:
            # With one image, and with other numbers than traced, a constant that the trace made of a size shows.
            for alone, counts in ((True, (1, 3)), (False, _SIZES if self._is_small else (1, 3))):
                for count in counts:
                    outputs = self(reference.images[:count], alone=alone)
                    require_close(outputs, reference.outputs, exact=self.dtype == "float32", source="OpenVINO")
        except RuntimeError as error:
            raise _does_not_run(error) from error

    def __call__(self, images: NDArray[np.uint8], *, alone: bool) -> HostOutputs:
        """Compute a batch uint8 [B, H, W, C], on all threads if no other computes; block while all streams are busy.

        Args:
            images: as many as one of `sizes`.

        Returns:
            What `request` asks for.

        Raises:
            RuntimeError: as OpenVINO raises it.
        """
        requests = _for(len(images), self._alone if alone else self._beside)
        outputs = requests.infer(np.ascontiguousarray(images))
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


def weights_bytes(model: openvino.Model, dtype: str) -> int:
    """Return the bytes of a graph's constants once they are rounded to a dtype; what is smaller already stays so."""
    bits = {"float32": 32, "bfloat16": 16}[dtype]
    constants = (each.output(0) for each in model.get_ops() if each.get_type_name() == "Constant")
    sizes = [int(math.prod(each.shape)) * min(int(each.element_type.bitwidth), bits) for each in constants]
    return sum(sizes) // 8


def _is_small(weights: int, streams: int) -> bool:
    """Return whether graphs for each size of a piece have room."""
    return len(_SIZES) * (weights + _GRAPH_BYTES + streams * _STREAM_BYTES) <= _FIXED_BYTES


def _for(count: int, requests: dict[int | None, Requests]) -> Requests:
    return requests.get(count) or requests[None]


def _does_not_run(error: RuntimeError) -> DeviceError:
    return DeviceError(f"OpenVINO does not run this model: {str(error).strip().splitlines()[-1]}")
