"""Makes the models of this process: as configured, or with checkpoints that were put instead."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from service.engine.backbones import PLACE, Checkpoint, ModelEngine
from service.models.folder import FolderEntry
from service.models.local_model import LocalModel
from service.models.override import Override
from service.settings import Settings


class ModelFactory:
    """Makes models by name.

    Args:
        settings: see `LocalModels`.
        make: returns an engine, not started yet, for a model's own settings.
        configured: entries of the folder of models; None for a single checkpoint.
        overrides: see `LocalModels`.
        on_retired: see `OpenVersions`.

    Attributes:
        configured: entries of the folder as they are now.
        overrides: as the argument.
        default: key of the default model.
    """

    def __init__(
        self,
        settings: Settings,
        make: Callable[[Mapping[str, Any]], ModelEngine],
        configured: Mapping[str, FolderEntry] | None,
        overrides: Mapping[str, Override] | None,
        on_retired: Callable[[], None],
    ) -> None:
        self.configured = dict(configured or {"": FolderEntry({}, {})})
        self.overrides = dict(overrides or {})
        self.default = next(iter(self.configured))
        if settings.models is not None and settings.model_name:
            self.default = settings.model_name
        self._settings = settings
        self._make = make
        self._on_retired = on_retired

    def models(self) -> dict[str, LocalModel]:
        """Return all models by key, the default first."""
        names = {*self.configured, *self.overrides}
        ordered = sorted(names, key=lambda name: (name != self.default, name))
        return {name: self.model(name) for name in ordered if not self.override(name).is_deleted}

    def override(self, name: str) -> Override:
        """Return the checkpoint that a name is to serve; for an unknown name, number 0."""
        return self.overrides.get(name, Override(1 if name in self.configured else 0))

    def model(self, name: str, override: Override | None = None) -> LocalModel:
        """Return a new model, by default with the checkpoint that it is to serve."""
        number, checkpoint, _ = override or self.override(name)
        model = LocalModel(
            partial(self._engine, name), checkpoint, number, on_retired=self._on_retired
        )
        # If no setting names the default, any of several models may become the default.
        is_fixed = bool(self._settings.model_name) or len(self.configured) == 1
        model.is_required = name == self.default and is_fixed
        return model

    def _engine(self, name: str, checkpoint: Checkpoint) -> ModelEngine:
        settings: dict[str, Any] = {}
        if isinstance(checkpoint, Mapping):
            settings = {PLACE: "the request", **checkpoint}
        else:
            if name in self.configured:
                settings.update(self.configured[name].settings)
            if checkpoint is not None:
                settings["checkpoint"] = checkpoint
            if name:
                settings[PLACE] = f"{name}.toml"
        if name:
            settings["model_name"] = name
        return self._make(settings)
