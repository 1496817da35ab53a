"""The backend that runs the network in OpenVINO on the CPU.

Its fused kernels take less time than torch's operators, most of all for few images at a time. The torch module is
traced once, in float32; OpenVINO rounds to bfloat16 itself. https://docs.openvino.ai
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.errors import DeviceError
from model.outputs import MapRequest
from model.runtime.backend import Images, stacked
from model.runtime.batches import BatchOutputs, BatchRequest, compute_in_pieces
from model.runtime.openvino.graph import PRECISIONS, core
from model.runtime.openvino.network import OpenVinoNetwork
from model.runtime.torch_cpu import TorchCpu

logger = logging.getLogger(__name__)


def unsupported_reason(device: str, dtype: str) -> str | None:
    """Return why OpenVINO cannot compute in the dtype of this name on this device, or None."""
    if device != "cpu":
        return f"it runs on the CPU here, not on {device}"
    if importlib.util.find_spec("openvino") is None:
        return "the package is not installed: pip install -e '.[openvino]' in the clone"
    if dtype not in PRECISIONS:
        return f"it has no {dtype} here"
    capability, _ = PRECISIONS[dtype]
    offered = core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return None if capability in offered else f"this CPU has no {capability} instructions that it uses"


class OpenVino:
    """Computes all but rows of other layers than the last, and explanations, which are torch's.

    Relevance, and embeddings that need tokens which the head does not read, have a network of their own each, which
    shares the float32 weights. It is made on a thread when it is first asked for. Until then, or if that fails, and
    where a batch asks for both, torch computes.

    Args:
        network: gives no extras.
        with_extras: returns a network that gives these, too, compiled on one thread; raises DeviceError.
        int8: computes batches of which nothing but classes and their logits is asked.
    """

    def __init__(
        self,
        network: OpenVinoNetwork,
        fallback: TorchCpu,
        with_extras: Callable[[BatchRequest], OpenVinoNetwork],
        int8: OpenVinoNetwork | None = None,
    ) -> None:
        self.name = f"openvino {network.version}"
        self.compilation, self.batch_sizes = fallback.compilation, fallback.batch_sizes
        self._network = network
        self._classifier = int8 or network
        self._torch = fallback
        self._with_extras = with_extras
        self._networks: dict[BatchRequest, OpenVinoNetwork | None] = {BatchRequest(): network}
        self._preparing = threading.Lock()

    def predict(self, images: Images, request: BatchRequest) -> BatchOutputs:
        """See `Backend.predict`."""
        extras = request.extras
        if extras not in self._networks and not (extras.relevance and extras.all_tokens):
            # Not a daemon: a thread that ends within OpenVINO's own code takes the process with it.
            threading.Thread(target=self.prepare, args=(extras,), name="openvino-prepare").start()
        network = self._networks.get(extras)
        if not (request.layers or request.embeddings or request.relevance):
            network = self._classifier
        if network is None or not network.request.covers(request):
            return self._torch.predict(images, request)
        with self._torch.threads as alone:
            return self._torch.postprocess(_in_pieces(network, stacked(images), alone=alone), request.top_k)

    def prepare(self, extras: BatchRequest) -> None:
        """Make the network that gives these extras, once; if it cannot be made that is logged, and torch stays."""
        with self._preparing:
            if extras in self._networks:
                return
            self._networks[extras] = None
        torch.set_num_threads(1)  # of the calling thread
        try:
            self._networks[extras] = self._with_extras(extras)
        except (DeviceError, RuntimeError) as error:
            logger.warning("torch computes %s: %s", "relevance" if extras.relevance else "means of patches", error)

    def explain(
        self, images: NDArray[np.uint8], targets: NDArray[np.int64] | NDArray[np.float32], request: MapRequest
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.explain`."""
        return self._torch.explain(images, targets, request)

    def logits(self, images: NDArray[np.uint8]) -> Tensor:
        """See `Backend.logits`."""
        return _in_pieces(self._classifier, images, alone=True).tensors()["logits"]

    def exercise(self, sizes: Sequence[int]) -> None:
        """See `Backend.exercise`; torch, which computes rows of other layers alone, is exercised at the first size."""
        # Its largest batch would take a fifth of the engine's start.
        self._torch.exercise(sizes[:1])
        for turn, size in enumerate(sizes):
            self._torch.require_finite(self.logits(self._torch.trial_images(size, turn)))

    def fill_caches(self, size: int) -> None:
        """See `Backend.fill_caches`."""
        self._classifier.fill_caches(self._torch.trial_images(size, 0))

    def compile(self) -> None:
        """Do nothing: OpenVINO compiles its graphs when they are made."""


def _in_pieces(network: OpenVinoNetwork, images: NDArray[np.uint8], *, alone: bool) -> BatchOutputs:
    return compute_in_pieces(images, partial(network, alone=alone), network.sizes(alone=alone))
