"""Makes the models of this process: as configured, or with checkpoints that were put instead."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from service.engine.backbones import Checkpoint, ModelEngine
from service.models.folder import FolderEntry
from service.models.generation import Version
from service.models.local_model import LocalModel
from service.settings import Settings


class ModelFactory:
    """Makes models by name.

    Args:
        settings: see `LocalModels`.
        make: returns an engine, not started yet, for a model's own settings.
        configured: entries of the folder of models; None for a single checkpoint.
        versions: versions by name that are served, or deleted, instead of the configured ones.
        on_retired: called when an old version of a model is closed and forgotten.

    Attributes:
        configured: entries of the folder as they are now.
        versions: as the argument.
        default: key of the default model.
    """

    def __init__(
        self,
        settings: Settings,
        make: Callable[[Mapping[str, Any]], ModelEngine],
        configured: Mapping[str, FolderEntry] | None,
        versions: Mapping[str, Version] | None,
        on_retired: Callable[[], None],
    ) -> None:
        self.configured = dict(configured or {"": FolderEntry({}, {})})
        self.versions = dict(versions or {})
        self.default = next(iter(self.configured))
        if settings.models is not None and settings.model_name:
            self.default = settings.model_name
        self._settings = settings
        self._make = make
        self._on_retired = on_retired

    def models(self) -> dict[str, LocalModel]:
        """Return all models by key, the default first."""
        names = {*self.configured, *self.versions}
        ordered = sorted(names, key=lambda name: (name != self.default, name))
        return {name: self.model(name) for name in ordered if not self.version(name).gone}

    def version(self, name: str) -> Version:
        """Return the version of a model that is to be served; of an unknown one, number 0."""
        return self.versions.get(name, Version(1 if name in self.configured else 0))

    def model(self, name: str, version: Version | None = None) -> LocalModel:
        """Return a new model, by default with the version that is to be served."""
        number, checkpoint, _ = version or self.version(name)
        model = LocalModel(
            partial(self._engine, name), checkpoint, number, on_retired=self._on_retired
        )
        # If the default is not named, any of several models may become it.
        is_fixed = bool(self._settings.model_name) or len(self.configured) == 1
        model.is_default = name == self.default and is_fixed
        return model

    def _engine(self, name: str, checkpoint: Checkpoint) -> ModelEngine:
        settings: dict[str, Any] = {}
        if isinstance(checkpoint, Mapping):
            settings.update(checkpoint)
        else:
            if name in self.configured:
                settings.update(self.configured[name].settings)
            if checkpoint is not None:
                settings["checkpoint"] = checkpoint
        if name:
            settings["model_name"] = name
        return self._make(settings)
