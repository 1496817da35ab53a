"""All models of this process, and how the operator removes and reloads them.

unload    give the memory back until a request comes
delete    remove the name, and close its versions after their last requests
reload    load, replace and delete models as the folder says
"""

import asyncio
import logging

from service.errors import ServiceError
from service.models.configured import configured_models
from service.models.folder import FolderEntry
from service.models.override import Override
from service.models.swap import SwappableModels

logger = logging.getLogger("vitserve")


class LocalModels(SwappableModels):
    """Models of this process that can be unloaded, deleted and reloaded; see `OnDemandModels`."""

    async def unload(self, name: str) -> None:
        """Give a model's memory back; see `Models.unload`."""
        self.require_changeable(name)
        async with self._load_lock:
            if self.served[self.key(name)].state != "ready":
                return
            unloading = self._memory.unload([self.served[name]])
        await asyncio.shield(unloading)

    async def delete(self, name: str) -> None:
        """Remove a model; see `Models.delete`."""
        self.require_changeable(name)
        await self.answer_waiting(name)
        self.require_changeable(name)  # another request may have deleted it meanwhile
        model = self.served.pop(name)
        self.refused.discard(name)
        self.overrides[name] = Override(model.current.number, is_deleted=True)
        self._tasks.begin(model.versions.retire_all(model.current))
        self.on_change()

    async def _read_again(self) -> None:
        """Reconcile the models with the folder; load a single checkpoint again in any case."""
        before = self._factory.configured
        default = self.default_name
        entries = await asyncio.to_thread(configured_models, self._settings, before)
        configured = {default: before[default], **entries}
        self._factory.configured = configured
        for name in (before.keys() - configured.keys()) & self.served.keys():
            await self.delete(name)
            logger.info("model %s is no longer in the folder, and is removed", name)
        if default not in entries:
            logger.warning(
                "model %s is no longer in the folder, and stays because it is the default", default
            )
        for name, entry in entries.items():
            if before.get(name) is entry:  # the entry is broken now
                continue
            try:
                await self._reconcile(name, entry, before.get(name))
            except ServiceError as error:
                logger.warning("not reloaded: %s", error)

    async def _reconcile(self, name: str, entry: FolderEntry, before: FolderEntry | None) -> None:
        model = self.served.get(name)
        if model is None:
            number = self.overrides[name].number + 1 if name in self.overrides else 1
            self.overrides[name] = Override(number)
            self.served[name] = self._factory.model(name)
            self._begin_load(name)
            return
        is_same = model.current.checkpoint is None and before == entry
        if not is_same or not entry.files:
            await self.replace(name, None, waits=True)
