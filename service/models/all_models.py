"""All models of a service: their names, and the changes that requests and the operator cause.

`LocalModels` has the models of this process, and `service.extensions.cluster.remote_model` the
models of other processes. When the folder of models is read again, its entries replace models of
the same names that came over HTTP, and restore deleted ones.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final

from service.background import Tasks
from service.engine.backbones import Checkpoint
from service.errors import ServiceError, SettingsError
from service.models.names import Names
from service.models.served_model import ServedModel

logger = logging.getLogger("vitserve")

SWAP_UNDER_WAY: Final = "another checkpoint is being loaded: try again when that is done"


class Models(Names, ABC):
    """The models of a service, which can be loaded and changed; see `Names`."""

    def __init__(self, served: Mapping[str, ServedModel], default: str = "") -> None:
        super().__init__(served, default)
        self._tasks = Tasks()
        self._reload_again = False
        self._reloading: asyncio.Task[None] | None = None

    @abstractmethod
    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading; `on_change` is called on the event loop when a model's state changes."""

    @abstractmethod
    async def close(self) -> None:
        """Close all models."""

    @abstractmethod
    async def load(self, name: str | None, caller: str = "") -> None:
        """Wait until the current version of a model answers, and load it if it is unloaded.

        Args:
            name: name of the model; None for the default.
            caller: the client that is charged for the load; empty for the operator.

        Raises:
            ModelsFull: the memory for models is full.
            What `require_ready` raises.
        """

    @abstractmethod
    async def put(self, name: str, checkpoint: Checkpoint) -> bool:
        """Load a model, or replace the model of this name; return whether the name is new.

        Raises:
            CheckpointRefused: the checkpoint cannot be served; the served version stays.
            SwapUnderWay: another checkpoint is being loaded.
            EngineUnavailable: no model is ready yet.
            ModelsFull: the memory for models is full.
            NameTaken: another model has the name of the checkpoint.
            Forbidden: models cannot be changed here.
        """

    @abstractmethod
    async def unload(self, name: str) -> None:
        """Give a model's memory back until a request asks for it.

        Raises:
            DefaultModel, Forbidden, UnknownModel: the model cannot be unloaded.
        """

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Remove a model, which still answers its requests; raises as `unload`."""

    def reload(self) -> None:
        """Reconcile the served models with the configuration, in the background.

        The reload waits for the load under way. Errors are logged.
        """
        # A reload under way may have read a file before that file was replaced.
        self._reload_again = True
        if self._reloading is None or self._reloading.done():
            self._reloading = self._tasks.begin(self._reload())

    async def _reload(self) -> None:
        while self._reload_again:
            self._reload_again = False
            try:
                await self._read_again()
            except (ServiceError, SettingsError) as error:
                logger.warning("not reloaded: %s", error)

    @abstractmethod
    async def _read_again(self) -> None:
        """Reconcile the served models with the configuration, once."""
