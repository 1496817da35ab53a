"""The backend that runs the network in OpenVINO on the CPU.

Its fused kernels are faster than torch's operators, most of all for few images at a time.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from model.errors import DeviceError, VitError
from model.runtime.backend import Backend, HostOutputs, Images, stacked
from model.runtime.batch_request import BatchRequest, GraphKind
from model.runtime.batch_sizes import SIZES
from model.runtime.cpu import ThreadPolicy, give_back_memory, keep_freed_memory
from model.runtime.openvino.network import OpenVinoNetwork

if TYPE_CHECKING:
    from model.runtime.torch_backend import TorchBackend

logger = logging.getLogger(__name__)

# Reason for this backend, as `/model` shows it.
REASON: Final = "OpenVINO is installed, has the dtype and agrees with torch"


class OpenVino(Backend):
    """Computes with OpenVINO, except rows of earlier layers, some embeddings, and explanations.

    Torch computes those. Relevance and transfer features each have their own network, which shares
    the float32 weights. A thread builds it on the first request for it. Until then, or if that
    fails, torch computes. If torch is not loaded yet, `defers` is true, and the engine moves the
    request to the thread of maps.

    Args:
        network: the plain network.
        threads: counts the batches that are being computed.
        make_torch: imports torch, which takes a second and 180 MiB, and returns its backend with
            the same threads; one thread calls it when torch is first needed.
        make_network: builds another network; raises DeviceError or RuntimeError.
    """

    def __init__(
        self,
        network: OpenVinoNetwork,
        threads: ThreadPolicy,
        make_torch: Callable[[], TorchBackend],
        make_network: Callable[[GraphKind], OpenVinoNetwork],
    ) -> None:
        keep_freed_memory()
        self.name = f"openvino {network.version}"
        self.largest_tried = 1  # graphs of other sizes are compiled in the background
        self.usual = (BatchRequest(), network.request)
        self._network = network
        self._threads = threads
        self._make_torch = make_torch
        self._make_network = make_network
        # None: the network cannot be built.
        self._networks: dict[GraphKind, OpenVinoNetwork | None] = {"plain": network}
        self._started: set[GraphKind] = {"plain"}
        self._in_service = False
        self._preparing = threading.Lock()
        self._loading = threading.Lock()
        self._torch: TorchBackend | None = None

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`."""
        kind = request.graph_kind
        if self._torch is None:
            self.prepare(kind)
        elif kind not in self._started:
            self._started.add(kind)
            # Not a daemon: a thread that ends within OpenVINO's code crashes the process.
            threading.Thread(target=self.prepare, args=(kind,), name="openvino-prepare").start()
        network = self._network_of(request)
        if network is not None:
            try:
                with self._threads as alone:
                    return network(stacked(images), alone=alone)
            except DeviceError as error:  # a graph that was just compiled differs from torch
                logger.warning("torch computes a batch: %s", error)
        return self.load_torch().predict(images, request)

    def load_torch(self) -> TorchBackend:
        """See `Backend.load_torch`."""
        with self._loading:
            if self._torch is None:
                try:
                    self._torch = self._make_torch()
                except VitError as error:  # fails this batch, but not the engine
                    raise RuntimeError(str(error)) from error
            return self._torch

    def _network_of(self, request: BatchRequest) -> OpenVinoNetwork | None:
        """Return the network that computes the whole request, or None."""
        network = self._networks.get(request.graph_kind)
        if network is None or not network.request.covers(request):
            return None
        return network

    def covers(self, request: BatchRequest) -> bool:
        """See `Backend.covers`."""
        return self._network_of(request) is not None

    def defers(self, request: BatchRequest) -> bool:
        """See `Backend.defers`."""
        return self._torch is None and self._network_of(request) is None

    def prepare(self, kind: GraphKind) -> None:
        """Build a network, once; if that fails, torch computes its outputs."""
        if kind in self._networks:
            return
        with self._preparing:
            if kind in self._networks:
                return
            network = None
            try:
                network = self._make_network(kind)
                # Only a server computes enough images to pay for graphs of several batch sizes.
                if self._in_service:
                    _complete_later(network)
            except (DeviceError, RuntimeError) as error:
                if threading.main_thread().is_alive():  # else a command ended before its graph
                    logger.warning("torch computes %s: %s", kind, error)
            self._networks[kind] = network

    def compile(self) -> None:
        """Start a thread that compiles for the other sizes."""
        give_back_memory()
        self._in_service = True
        _complete_later(self._network)


def _complete_later(network: OpenVinoNetwork) -> None:
    """Start a thread that compiles a network's graphs of all sizes, because requests wait."""
    reference = weakref.ref(network)
    threading.Thread(target=_complete, args=(reference,), name="openvino-compile").start()


def _complete(network: weakref.ref[OpenVinoNetwork]) -> None:
    """Compile a network's graphs of all sizes, unless it is unloaded meanwhile."""
    try:
        for size in SIZES:
            loaded = network()
            if loaded is not None:
                loaded.complete(size)
            del loaded
    except (DeviceError, RuntimeError) as error:
        logger.warning("batches of some sizes are computed by torch: %s", error)
    give_back_memory()
