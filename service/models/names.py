"""The models of a service by name: how a request finds and holds one, and the list of all."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from service.engine.messages import EngineStatus
from service.errors import DefaultModel, EngineUnavailable, Forbidden, ModelFailed, UnknownModel
from service.models.served_heads import ServedHead
from service.models.served_model import ServedModel
from service.models.version import Lease
from vitserve.documents import ListedModel


class Names:
    """Models by name, one of which is the default.

    A key of `served` is a model's name. The key of a single checkpoint is empty, because its name
    is known only when it is loaded.

    Args:
        served: models by key.
        default: key of the model that answers requests without a name.

    Attributes:
        heads: heads that are served like models, under names that no model has.
        results: number of loads by result, of swaps that were `served` or `refused`, and of
            backbones that were `evicted`.
        refused: keys of models whose last swap was refused.
        on_change: called on the event loop when the state of a model changes.
    """

    heads: Mapping[str, ServedHead] = MappingProxyType({})

    def __init__(self, served: Mapping[str, ServedModel], default: str = "") -> None:
        self.served = dict(served)
        self.default_name = default
        self.results: Mapping[str, int] = {}
        self.refused: set[str] = set()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def default(self) -> ServedModel:
        """Return the default model."""
        return self.served[self.default_name]

    def name_of(self, key: str) -> str:
        """Return the name of a model as answers have it."""
        info = self.served[key].info
        return key or (info.name if info is not None else "")

    def names(self) -> list[str]:
        """Return the names of all models and heads, sorted."""
        return sorted([*map(self.name_of, self.served), *self.heads])

    def key(self, name: str | None, *, is_new: bool = False) -> str:
        """Return the key of a model; None is the default's name.

        A head has the key of the model whose features it scores.

        Args:
            name: name of a model or head.
            is_new: whether a new model may get this name, which is then its key.

        Raises:
            UnknownModel: no model or head has this name, and it may not be new.
            EngineUnavailable: the same, but the names are not known yet.
            What `ServedHead.require_key` raises.
        """
        if name is None:
            return self.default_name
        if name in self.heads:
            return self.heads[name].require_key(models_load=self._are_loading())
        if name in self.served and name:
            return name
        if name and name == self.name_of(self.default_name):
            return self.default_name
        if is_new:
            return name
        if not self.name_of(self.default_name):  # its checkpoint is still loading
            self.require_ready(self.default_name)
        wrong = f"unknown model {name!r:.200}"
        if "," in name or name == "*":
            wrong = f"{name!r:.200}: expected one model; POST /classify takes several"
        available = ", ".join(self.names())
        raise UnknownModel(f"{wrong}; available: {available:.2000}")

    def acquire(self, name: str | None) -> Lease:
        """Hold the current version of a described model until its release; see `Models.load`.

        Raises:
            The errors of `key`, and of `require_ready` unless `Models.load` can load the model.
        """
        key = self.key(name)
        model = self.served[key]
        info = model.info
        if model.state != "unloaded" or info is None:
            self.require_ready(key)
        assert info is not None, "a ready model is described"
        version = model.current
        version.hold()
        head = self.heads.get(name or "")
        is_ready = version.engine.ready
        if head is None:
            return Lease(version, info, is_loaded=is_ready)
        return Lease(version, head.info(info), head.head, is_ready)

    def needs_load(self, name: str | None) -> bool:
        """Return whether `acquire` needs `Models.load` first, which describes the model.

        The default model is not loaded for a request, because the service is not ready without it.
        """
        model = self.served[self.key(name)]
        is_loadable = model.state == "loading" or (model.state == "unloaded" and model.info is None)
        return is_loadable and model is not self.default

    def require_ready(self, key: str) -> None:
        """Raise an error if a model does not answer now.

        Raises:
            ModelFailed: the model could not be loaded. A failed default model is a failure of the
                service instead.
            EngineUnavailable: the model is not ready for another reason.
        """
        model = self.served[key]
        engine = model.current.engine
        if engine.ready and engine.info is not None:
            return
        reason = self.status_of(key).reason or engine.status.reason
        if model is not self.default and key:
            reason = f"{key}: {reason}"
            if model.state == "failed" and self.default.current.engine.ready:
                raise ModelFailed(reason)
        raise EngineUnavailable(reason)

    def require_changeable(self, name: str) -> None:
        """Raise an error if a name cannot be unloaded or deleted.

        Raises:
            Forbidden: it is a head.
            DefaultModel: it is the default model.
            UnknownModel: no model has this name.
        """
        if name in self.heads:
            raise Forbidden(f"{name}: it is a head, not a model: {self.heads[name].removal}")
        if self.key(name) == self.default_name:
            raise DefaultModel(
                f"{name!r:.200} is the default model: put another checkpoint in its place"
            )

    # The list

    def describe(self) -> list[ListedModel]:
        """Return the status of each model and head, sorted by name."""
        listed = [self.status_of(key) for key in self.served]
        models_load = self._are_loading()
        for head in self.heads.values():
            model = None
            if head.key is not None and head.key in self.served:
                model = self.status_of(head.key)
            listed.append(head.listed(model, models_load=models_load))
        return sorted(listed, key=lambda status: status.name)

    def status_of(self, key: str) -> ListedModel:
        """Return the status of a model."""
        return self.served[key].listed(self.name_of(key), is_default=key == self.default_name)

    def reloads(self) -> dict[str, bool]:
        """Return by name whether the last swap of each model was served; true without a swap."""
        return {self.name_of(key): key not in self.refused for key in self.served}

    def statuses(self) -> list[EngineStatus]:
        """Return the status of each engine that computes, the default's first."""
        ready = [model for model in self.served.values() if model.state == "ready"]
        engines = [model.current.engine for model in (self.default, *ready)]
        # Models may share an engine.
        statuses = {id(getattr(engine, "backbone", engine)): engine.status for engine in engines}
        return list(statuses.values())

    def _are_loading(self) -> bool:
        return any(model.state == "loading" for model in self.served.values())
