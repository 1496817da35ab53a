"""The backend that runs the network in OpenVINO on the CPU.

Its fused kernels take less time than torch's operators, most of all for few images at a time. The torch module is
traced once, in float32; OpenVINO rounds to bfloat16 itself. https://docs.openvino.ai
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from model.errors import DeviceError, VitError
from model.outputs import MapRequest
from model.runtime.backend import Compilation, CompilationState, require_finite, trial_images
from model.runtime.batches import UNCUT, BatchRequest, HostOutputs, Images, stacked
from model.runtime.cpu import ThreadPolicy, give_back_memory, keep_freed_memory
from model.runtime.openvino.graph import PRECISIONS, core
from model.runtime.openvino.network import OpenVinoNetwork
from model.runtime.scores import Scores

if TYPE_CHECKING:
    from model.runtime.torch_cpu import TorchCpu

logger = logging.getLogger(__name__)

REASON: Final = "OpenVINO is installed, has the dtype and agrees with torch"
"""Why it runs the network."""


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


class LazyTorch:
    """Torch's backend, made when it is first needed: importing torch alone takes a second and 180 MiB.

    Args:
        make: imports torch and builds the backend; called once, by one thread.
    """

    def __init__(self, make: Callable[[], TorchCpu]) -> None:
        self._make = make
        self._loading = threading.Lock()
        self.loaded: TorchCpu | None = None

    def load(self) -> TorchCpu:
        """Return the backend; raises RuntimeError where it cannot be made, each time anew."""
        with self._loading:
            if self.loaded is None:
                try:
                    self.loaded = self._make()
                except VitError as error:  # of one batch, and no reason to end the engine
                    raise RuntimeError(str(error)) from error
            return self.loaded


class OpenVino:
    """Computes all but rows of other layers than the last, and explanations, which are torch's.

    Relevance, and embeddings that need tokens which the head does not read, have a network of their own each, which
    shares the float32 weights. It is made on a thread when it is first asked for. Until then, or if that fails, and
    where a batch asks for both, torch computes; where torch is not loaded, `defers` says so beforehand.

    Args:
        network: gives no extras.
        scores: what logits become.
        threads: counts the batches under way.
        fallback: torch's backend, which takes the same threads.
        with_extras: returns a network that gives these, too, compiled on one thread; raises DeviceError.
        afterwards: keeps the network's graph for a later start, or compiles what such a start left out.
    """

    def __init__(
        self,
        network: OpenVinoNetwork,
        scores: Scores,
        threads: ThreadPolicy,
        fallback: LazyTorch,
        with_extras: Callable[[BatchRequest], OpenVinoNetwork],
        afterwards: Callable[[], None] = lambda: None,
    ) -> None:
        keep_freed_memory()
        self.name = f"openvino {network.version}"
        self.compilation = Compilation(CompilationState.OFF)
        self.batch_sizes: tuple[int, ...] | None = None
        self._network = network
        self._scores, self._threads, self._torch = scores, threads, fallback
        self._with_extras, self._afterwards = with_extras, afterwards
        self._networks: dict[BatchRequest, OpenVinoNetwork | None] = {BatchRequest(): network}
        self._preparing = threading.Lock()

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`."""
        extras = request.extras
        if extras not in self._networks and not (extras.relevance and extras.all_tokens):
            if self._torch.loaded is None:
                self.prepare(extras)
            else:
                # Not a daemon: a thread that ends within OpenVINO's own code takes the process with it.
                threading.Thread(target=self.prepare, args=(extras,), name="openvino-prepare").start()
        network = self._networks.get(extras)
        if network is None or not network.request.covers(request):
            return self._torch.load().predict(images, request)
        with self._threads as alone:
            return self._scores(network(stacked(images), alone=alone), request.top_k)

    def defers(self, request: BatchRequest) -> bool:
        """See `Backend.defers`."""
        if self._torch.loaded is not None:
            return False
        network = self._networks.get(request.extras)
        return network is None or not network.request.covers(request)

    def prepare(self, extras: BatchRequest) -> None:
        """Make the network that gives these extras, once; if it cannot be made that is logged, and torch stays."""
        with self._preparing:
            if extras in self._networks:
                return
            try:
                network = self._with_extras(extras)
            except (DeviceError, RuntimeError) as error:
                logger.warning("torch computes %s: %s", "relevance" if extras.relevance else "means of patches", error)
                network = None
            self._networks[extras] = network

    def explain(
        self, images: NDArray[np.uint8], targets: NDArray[np.int64] | NDArray[np.float32], request: MapRequest
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Backend.explain`."""
        return self._torch.load().explain(images, targets, request)

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See `Backend.logits`."""
        return self._network(images, alone=True).tensors()["logits"]

    def exercise(self, sizes: Sequence[int]) -> None:
        """See `Backend.exercise`; torch, which computes rows of other layers alone, is exercised at the first size."""
        if self._torch.loaded is not None:
            # Its largest batch would take a fifth of the engine's start.
            self._torch.loaded.exercise(sizes[:1])
        # A larger batch is cut to pieces.
        for turn, size in enumerate(dict.fromkeys(min(size, UNCUT) for size in sizes)):
            images = trial_images(self._scores.config, size, turn)
            require_finite(self.logits(images), "cpu", self._network.dtype)

    def fill_caches(self, size: int) -> None:
        """See `Backend.fill_caches`."""
        self._network.fill_caches(trial_images(self._scores.config, size, 0))

    def compile(self) -> None:
        """Do what nobody waits for, on a thread; the graphs that answer are compiled already."""
        give_back_memory()
        afterwards, self._afterwards = self._afterwards, lambda: None

        def run() -> None:
            afterwards()
            give_back_memory()

        threading.Thread(target=run, name="openvino-keep").start()
