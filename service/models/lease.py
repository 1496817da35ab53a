"""The lease by which a request holds one version of a model.

A request belongs to one version from its headers to its answer, and so to its labels, input size
and preprocessing:

    lease = models.acquire(name)        describes the model, and holds its version
    await lease.load(models, caller)    loads the version if it is unloaded
    await lease.engine.infer(...)
    lease.release()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from model.heads import Head
from service.engine.interface import Engine
from service.engine.messages import ModelInfo
from service.errors import EngineUnavailable, ServiceError
from service.models.version import Version

if TYPE_CHECKING:
    from service.models.all_models import Models


@dataclass(slots=True)
class Lease:
    """A model that a request holds, from its headers to its answer.

    Attributes:
        version: the version that the request belongs to.
        info: the description of the model, or of the served head that the request names.
        head: the head that scores the features, if the request names a served head.
        is_loaded: whether the version could answer when it was acquired, or was loaded since.
    """

    version: Version[Engine]
    info: ModelInfo
    head: Head | None = None
    is_loaded: bool = True

    @property
    def engine(self) -> Engine:
        """Return the engine that computes the version."""
        return self.version.engine

    async def load(self, models: Models, caller: str) -> None:
        """Load the version if it is unloaded; it stays loaded until the release.

        Args:
            models: the models of the service.
            caller: see `Models.load`.

        Raises:
            EngineUnavailable: another version has replaced it meanwhile.
            What `Models.load` raises.
        """
        name = self.info.name
        if not self.engine.ready:  # else it is loaded, even if another model has its name by now
            try:
                await models.load(name, caller)
            except ServiceError:
                if not self.engine.ready:
                    raise
        info = self.engine.info if self.engine.ready else None
        if info is None or (info.content, info.head) != (self.info.content, self.info.head):
            raise EngineUnavailable(f"{name}: it was replaced while it was unloaded: try again")
        self.is_loaded = True

    def release(self) -> None:
        """Stop holding the version."""
        self.version.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
