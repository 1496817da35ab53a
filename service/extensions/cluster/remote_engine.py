"""One version of a model on the engines of other processes."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable
from service.extensions.cluster import frames
from service.extensions.cluster.engine_client import EngineClient, EngineLease


class RemoteEngine:
    """One version of a model, computed by engines of other processes; see `Engine`.

    Each image goes to the engine with the fewest requests of this worker.

    Args:
        clients: connections to all engines.

    Attributes:
        engines: the leases of the version; none until `serve`.
        served: set by `serve`.
    """

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.info: ModelInfo | None = None
        self.engines: tuple[EngineLease, ...] = ()
        self.served = asyncio.Event()
        self._clients = clients
        self._turns = itertools.count()

    @property
    def ready(self) -> bool:
        """Return whether an engine has the version and takes images."""
        return any(lease.is_usable for lease in self.engines)

    @property
    def status(self) -> EngineStatus:
        """Return the status of the first engine that has the version, or of the first engine."""
        return (self.engines or self._clients)[0].status

    def serve(self, leases: tuple[EngineLease, ...]) -> None:
        """Begin to answer by these leases, which are the same version of the model."""
        self.engines = leases
        devices = ",".join(lease.info.device for lease in leases)
        self.info = replace(leases[0].info, device=devices)
        self.served.set()

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        usable = self._usable()
        first = next(self._turns) % len(usable)  # equal engines take turns
        in_turn = usable[first:] + usable[:first]
        lease = min(in_turn, key=lambda lease: len(lease.client.pending))
        pixels = lease.client.put(request.pixels)
        submit = frames.Submit(lease.id, pixels, request.requested, timeout)
        result: InferenceResult = await lease.client.ask(submit)
        return result

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> NDArray[np.float32]:
        """See `Engine.embed_texts`; all workers ask the same engine, which caches the texts."""
        lease = self._usable()[0]
        request = frames.EmbedTexts(lease.id, tuple(texts), timeout)
        features: NDArray[np.float32] = await lease.client.ask(request)
        return features

    def _usable(self) -> list[EngineLease]:
        usable = [lease for lease in self.engines if lease.is_usable]
        if not usable:
            raise EngineUnavailable(self.status.reason or "no engine has this model any more")
        return usable
