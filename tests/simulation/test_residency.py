"""Callers of more models than memory holds, with an injected clock and fake predictors."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.engine.backbones import Backbones
from service.engine.messages import ModelInfo
from service.errors import ModelsFull
from service.models.configured import configured_models
from service.models.local_models import LocalModels
from service.models.residency import RESIDENCY_SECONDS
from service.settings import Settings, load_settings
from tests.service.fakes import PATIENCE, FakePredictor, model_info, on_a_loop, until

NAMES = ("a", "b", "c", "d")


def load(settings: Settings, _: object) -> tuple[FakePredictor, ModelInfo]:
    name = Path(settings.checkpoint).name
    predictor = FakePredictor(size=100)
    predictor.heads[name] = name
    return predictor, model_info(name=name, backbone=name, head=name)


class Simulation:
    """Four models, of which three fit, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        for name in NAMES:
            (folder / name).mkdir()
            (folder / name / "config.json").touch()
        settings = load_settings({"models": str(folder), "models_bytes": "300"})
        pool = Backbones(settings, load, lambda _: None)
        self.models = LocalModels(
            settings, pool.engine, configured_models(settings), clock=lambda: self.now
        )

    async def ask(self, caller: str, name: str) -> int:
        """Return 0 if a model is available to a caller, otherwise the seconds of Retry-After."""
        try:
            await self.models.load(name, caller)
        except ModelsFull as error:
            assert error.retry_after is not None
            return error.retry_after
        return 0

    @property
    def evicted(self) -> int:
        return self.models.results["evicted"]


@asynccontextmanager
async def simulated(folder: Path) -> AsyncIterator[Simulation]:
    simulation = Simulation(folder)
    simulation.models.start(lambda: None)
    served = simulation.models.served
    try:
        await until(
            lambda: sorted(each.state for each in served.values()) == ["ready"] * 3 + ["unloaded"]
        )
        yield simulation
    finally:
        await asyncio.wait_for(simulation.models.close(), PATIENCE)


@on_a_loop
@pytest.mark.parametrize("callers", [1, 20])
async def test_thrash_costs_a_load_in_30_seconds(callers: int, tmp_path: Path) -> None:
    async with simulated(tmp_path) as simulation:
        refused = Counter[bool]()
        for turn in range(5 * 300):  # five minutes of five requests a second
            simulation.now += 0.2
            seconds = await simulation.ask(f"caller{turn % callers}", NAMES[1 + turn % 3])
            assert 0 <= seconds <= RESIDENCY_SECONDS
            refused[seconds > 0] += 1
        most = {1: 300 / RESIDENCY_SECONDS + 1, 20: 2 * (300 / RESIDENCY_SECONDS + 1)}[callers]
        assert 2 <= simulation.evicted <= most
        assert refused[True] < refused[False]


@on_a_loop
async def test_retry_after_is_when_a_load_succeeds(tmp_path: Path) -> None:
    async with simulated(tmp_path) as simulation:
        assert await simulation.ask("one", "d") == 0
        simulation.now += 10
        assert await simulation.ask("one", "b") == 20, "others were unloaded for this caller"
        assert await simulation.ask("two", "b") == 0, "at the place of c, which nobody asked for"
        assert await simulation.ask("three", "c") == 20, "d was loaded 10 s ago"
        simulation.now += 20
        assert await simulation.ask("three", "c") == 0
        assert simulation.evicted == 3


@on_a_loop
async def test_loads_of_an_operator_unload_any(tmp_path: Path) -> None:
    async with simulated(tmp_path) as simulation:
        for name in ("d", "b", "c", "d") * 2:
            assert await simulation.ask("", name) == 0
