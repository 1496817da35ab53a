"""Several models of fake engines, by name."""

from functools import partial
from typing import Any

from service.engine.backbones import Checkpoint
from service.errors import EngineUnavailable, ModelsFull
from service.models.local_model import LocalModel
from service.settings import load_settings
from tests.service.fakes import FixedModels, model_info
from tests.service.web.apps import App
from tests.service.web.fake_engine import FakeEngine

FEW = tuple(f"few {index}" for index in range(3))


class Named(FixedModels):
    """Models of fake engines.

    Attributes:
        changes: (`put` or `delete`, name, model) of each change.
        gone: name of a model that disappears as soon as it is put.
    """

    gone = ""

    def __init__(self, engines: dict[str, FakeEngine]) -> None:
        self.engines = engines
        self.changes: list[tuple[str, str, Any]] = []
        served = {name: LocalModel(partial(self._engine, name)) for name in engines}
        super().__init__(served, next(iter(engines)))

    def _engine(self, name: str, _: Checkpoint) -> Any:
        return self.engines[name]

    def give_back(self, name: str) -> None:
        """Leave a model unloaded, until its engine is ready."""
        self.engines[name].state = "loading"
        self.served[name].current.move("unloaded")

    async def load(self, name: str | None, caller: str = "") -> None:
        model = self.served[str(name)]  # it may be deleted before it is loaded
        if self.engines[str(name)].reason == "full":
            raise ModelsFull("there is no memory")
        if self.engines[str(name)].state == "failed":
            raise EngineUnavailable(f"{name}: {self.engines[str(name)].reason}")
        await self.engines[str(name)].gate.wait()
        self.engines[str(name)].state = "ready"
        if model.current.state == "unloaded":
            model.current.move("loading")

    async def put(self, name: str, checkpoint: Checkpoint) -> bool:
        self.changes.append(("put", name, checkpoint))
        if name == self.gone:
            del self.served[name]
        return name not in self.served

    async def delete(self, name: str) -> None:
        self._require_named(name)
        self.changes.append(("delete", name, None))

    def _require_named(self, name: str) -> None:
        self.key(name)


def several(**settings: Any) -> tuple[App, Named]:
    """Return an application of three models, and these models.

    `cats` is the default, `few` has three classes and another preprocessing, `bare` lacks classes.
    """
    info = model_info()
    preprocess = info.preprocess.model_copy(update={"interpolation": "bilinear"})
    few = model_info(
        name="few",
        labels=FEW,
        config=info.config.model_copy(update={"num_classes": 3}),
        preprocess=preprocess,
    )
    bare = model_info(
        name="bare", labels=(), config=info.config.model_copy(update={"num_classes": 0})
    )
    models = Named(
        {
            "cats": FakeEngine(model_info(name="cats")),
            "few": FakeEngine(few),
            "bare": FakeEngine(bare),
        }
    )
    return App(load_settings({"admin_key": "admin", **settings}), models=models), models
