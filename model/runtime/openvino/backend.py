"""The backend that runs the network in OpenVINO on the CPU.

Its fused kernels take less time than torch's operators, most of all for few images at a time. The torch module is
traced once, in float32; OpenVINO rounds to bfloat16 itself. https://docs.openvino.ai
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from model.errors import DeviceError, VitError
from model.heads import Head
from model.outputs import MapRequest
from model.runtime.backend import (
    SIZES,
    Aim,
    Backend,
    BatchRequest,
    HostOutputs,
    Images,
    ThreadPolicy,
    stacked,
    with_best,
)
from model.runtime.cpu import give_back_memory, keep_freed_memory
from model.runtime.openvino.network import PRECISIONS, OpenVinoNetwork, core

if TYPE_CHECKING:
    from model.runtime.torch_backend import TorchCpu

logger = logging.getLogger(__name__)

# Why it runs the network.
REASON: Final = "OpenVINO is installed, has the dtype and agrees with torch"


def unsupported_reason(dtype: str) -> str | None:
    """Return why OpenVINO cannot compute in the dtype of this name on the CPU, or None."""
    if importlib.util.find_spec("openvino") is None:
        return "the package is not installed: pip install 'vitserve[openvino]'"
    if dtype not in PRECISIONS:
        return f"it has no {dtype} here"
    capability, _ = PRECISIONS[dtype]
    offered = core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return None if capability in offered else f"this CPU has no {capability} instructions that it uses"


class OpenVino(Backend):
    """Computes all but rows of other layers than the last, some embeddings, and explanations, which are torch's.

    Relevance has a network of its own, which shares the float32 weights. It is made on a thread when it is first asked
    for. Until then, or if that fails, torch computes; where torch is not loaded, `defers` says so beforehand.

    Args:
        network: gives no relevance.
        head: the checkpoint's.
        threads: counts the batches under way.
        make_torch: imports torch, which takes a second and 180 MiB, and returns its backend, which takes the same
            threads; called by one thread when torch is first needed.
        with_relevance: returns the network that gives it; raises DeviceError or RuntimeError.
    """

    def __init__(
        self,
        network: OpenVinoNetwork,
        head: Head,
        threads: ThreadPolicy,
        make_torch: Callable[[], TorchCpu],
        with_relevance: Callable[[], OpenVinoNetwork],
    ) -> None:
        keep_freed_memory()
        self.name = f"openvino {network.version}"
        self.largest_tried = 1  # for others it compiles behind the service
        self.usual = (BatchRequest(), network.request)
        self._network, self._head, self._threads, self._make_torch = network, head, threads, make_torch
        self._with_relevance = with_relevance
        self._relevance: OpenVinoNetwork | None = None
        self._prepared = self._in_service = False
        self._preparing = threading.Lock()
        self._loading = threading.Lock()
        self._torch: TorchCpu | None = None

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`."""
        if request.relevance and not self._prepared:
            if self._torch is None:
                self.prepare()
            else:
                # Not a daemon: a thread that ends within OpenVINO's own code takes the process with it.
                threading.Thread(target=self.prepare, name="openvino-prepare").start()
        network = self._network_of(request)
        if network is not None:
            try:
                with self._threads as alone:
                    return with_best(network(stacked(images), alone=alone), self._head, request.top_k)
            except DeviceError as error:  # of a graph that was compiled just now
                logger.warning("torch computes a batch: %s", error)
        return self.load_torch().predict(images, request)

    def load_torch(self) -> TorchCpu:
        """Return torch's backend; raises RuntimeError where it cannot be made, each time anew."""
        with self._loading:
            if self._torch is None:
                try:
                    self._torch = self._make_torch()
                except VitError as error:  # of one batch, and no reason to end the engine
                    raise RuntimeError(str(error)) from error
            return self._torch

    def _network_of(self, request: BatchRequest) -> OpenVinoNetwork | None:
        """Return the network that gives all that is asked for, if there is one."""
        network = self._relevance if request.relevance else self._network
        return network if network is not None and network.request.covers(request) else None

    def covers(self, request: BatchRequest) -> bool:
        """See `Backend.covers`."""
        return self._network_of(request) is not None

    def defers(self, request: BatchRequest) -> bool:
        """See `Backend.defers`."""
        return self._torch is None and self._network_of(request) is None

    def prepare(self) -> None:
        """Make the network that gives relevance, once; torch computes it where that fails."""
        with self._preparing:
            if self._prepared:
                return
            try:
                network = self._with_relevance()
                if self._in_service:  # a few pictures do without the graphs of other sizes
                    network.complete(*SIZES)
                self._relevance = network
            except (DeviceError, RuntimeError) as error:
                logger.warning("torch computes relevance: %s", error)
            self._prepared = True

    def aim(self, images: Images, request: BatchRequest, aims: Sequence[Aim]) -> HostOutputs:
        """See `Backend.aim`: the graph with relevance begins it with the own head's weights."""
        return self.load_torch().aim(images, request, aims)

    def explain(
        self, images: NDArray[np.uint8], targets: NDArray[np.int64] | NDArray[np.float32], request: MapRequest
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Backend.explain`."""
        return self.load_torch().explain(images, targets, request)

    def compile(self) -> None:
        """Compile for the other sizes, on a thread: nobody waits for them."""
        give_back_memory()
        self._in_service = True

        network = weakref.ref(self._network)  # one that is unloaded meanwhile need not be complete

        def run() -> None:
            try:
                for size in SIZES:
                    found = network()
                    if found is not None:
                        found.complete(size)
                    del found
            except (DeviceError, RuntimeError) as error:
                logger.warning("batches of some sizes are computed by torch: %s", error)
            give_back_memory()

        threading.Thread(target=run, name="openvino-compile").start()
