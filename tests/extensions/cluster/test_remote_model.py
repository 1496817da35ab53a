"""Workers and engines over sockets: whose answers are whose, who learns of what, and swaps that all
take or none.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from model.errors import CheckpointError
from model.images.preprocess import ModelInput, Region
from service.engine.backbones import Checkpoint
from service.engine.engine import LocalEngine
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import CheckpointRefused, EngineUnavailable, SwapUnderWay, UnknownModel
from service.extensions.cluster import frames
from service.extensions.cluster.engine_client import EngineClient
from service.extensions.cluster.engine_server import EngineServer
from service.extensions.cluster.remote_images import RemoteImageStore
from service.extensions.cluster.remote_model import RemoteModel, RemoteModels
from service.extensions.cluster.shared_pixels import SharedPixels, shared_memory
from service.models.local_models import LocalModels
from service.models.override import Override
from service.settings import load_settings
from service.web.image_stores import MemoryImageStore, new_image_id
from tests.service.fakes import (
    PATIENCE,
    FakePredictor,
    expected_indices,
    holding,
    model_info,
    on_a_loop,
    pixels,
    request_for,
)

NO_BUFFERS = SharedPixels(memoryview(b""), 0)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@dataclass
class Device:
    """An engine process with fake predictors.

    Attributes:
        broken: unreadable checkpoints.
        gate: event that loads wait for.
    """

    path: Path
    broken: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    predictors: dict[str, FakePredictor] = field(default_factory=dict)
    shared: memoryview = field(default_factory=lambda: shared_memory(3))
    predictor: type[FakePredictor] = FakePredictor
    refresh_seconds: float = 0.01

    def __post_init__(self) -> None:
        self.gate.set()

    async def start(self, served: str | None = None, version: int = 1) -> None:
        self.models = LocalModels(
            load_settings(), self._make, overrides={"": Override(version, served)}
        )
        self.model = self.models.served[""]
        images = MemoryImageStore(ttl=60, max_bytes=1 << 20)
        self.server = EngineServer(
            self.models, images, self.shared, refresh_seconds=self.refresh_seconds
        )
        await self.server.start(self.path)

    async def die(self) -> None:
        """Disconnect like a killed process: without a message, and the socket file stays."""
        for worker in list(self.server.workers):
            assert worker._connection._transport is not None
            worker._connection._transport.abort()
        await self.server.close()

    def _make(self, own: Mapping[str, Any]) -> Any:
        name = own.get("checkpoint", "configured")

        def load() -> tuple[FakePredictor, ModelInfo]:
            assert self.gate.wait(PATIENCE)
            if name in self.broken:
                raise CheckpointError(f"{name}: no such file")
            self.predictors[name] = self.predictor()
            return self.predictors[name], replace(model_info(name=name), content=name)

        engine = LocalEngine(
            load, device="cpu", queue_size=50, max_delay=0, on_batch=lambda _: None
        )
        engine.last_used = None  # type: ignore[attr-defined]  # which engines of models have
        return engine


@dataclass
class Service:
    """Engines of one service, and the workers that use them."""

    devices: list[Device]
    workers: list[RemoteModels] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    async def worker(self) -> RemoteModels:
        """One more worker, which knows all engines."""
        engines = [
            EngineClient(device.path, "cpu", SharedPixels(device.shared, len(self.workers)))
            for device in self.devices
        ]
        model = RemoteModels(engines)
        model.start(lambda: self.changes.append(name_of(model)))
        self.workers.append(model)
        await until(
            lambda: (
                all(engine.leases for engine in model.engines)
                and model.default.current.engine.ready
            )
        )
        return model


def numbers(model: RemoteModels) -> list[set[int]]:
    """Return the numbers of the default model's versions in each engine."""
    leases = [engine.leases.get("", {}).values() for engine in model.engines]
    return [{lease.number for lease in of_engine} for of_engine in leases]


def name_of(model: RemoteModels) -> str:
    engine = model.default.current.engine
    return engine.info.name if engine.info is not None and engine.ready else engine.status.reason


async def load(model: RemoteModels, checkpoint: Checkpoint) -> None:
    await model.put(model.name_of(""), checkpoint)


@asynccontextmanager
async def running(
    engines: int = 1,
    refresh_seconds: float = 0.01,
    predictor: type[FakePredictor] = FakePredictor,
) -> AsyncIterator[Service]:
    with TemporaryDirectory() as folder:
        paths = [Path(folder, str(index)) for index in range(engines)]
        service = Service(
            [Device(path, refresh_seconds=refresh_seconds, predictor=predictor) for path in paths]
        )
        for device in service.devices:
            await device.start()
        try:
            yield service
        finally:
            for device in service.devices:
                device.gate.set()
                for loaded in device.predictors.values():
                    loaded.gate.set()
            for worker in service.workers:
                await worker.close()
            for device in service.devices:
                await device.server.close()


def ask(model: RemoteModels, red: int, timeout: float = PATIENCE) -> asyncio.Task[InferenceResult]:
    return asyncio.create_task(
        model.default.current.engine.infer(request_for(red), timeout=timeout)
    )


async def check(answers: Iterable[asyncio.Task[InferenceResult]], reds: Iterable[int]) -> None:
    for answer, red in zip(answers, reds, strict=True):
        assert (await answer).outputs.indices.tolist() == expected_indices(red, 3)


@on_a_loop
async def test_requests_of_workers_share_batches() -> None:
    async with running() as service:
        workers = [await service.worker() for _ in range(3)]
        predictor = service.devices[0].predictors["configured"]
        predictor.gate.clear()
        answers = [ask(workers[red % 3], red) for red in range(30)]
        await until(lambda: service.devices[0].model.current.engine.status.queue_depth >= 25)
        predictor.gate.set()
        await check(answers, range(30))
        assert any(len({red % 3 for red in batch}) > 1 for batch in predictor.launched)


@on_a_loop
async def test_dead_worker_loses_only_its_requests() -> None:
    async with running() as service:
        dies, stays = [await service.worker() for _ in range(2)]
        predictor = service.devices[0].predictors["configured"]
        predictor.gate.clear()
        busy = ask(stays, 0)
        await predictor.wait_until_busy()
        gone = ask(dies, 1)
        kept = ask(stays, 2)
        await until(lambda: service.devices[0].model.current.engine.status.queue_depth == 2)
        await dies.close()
        with pytest.raises(EngineUnavailable):
            await gone
        await until(lambda: service.devices[0].model.current.engine.status.queue_depth == 1)
        predictor.gate.set()
        await check([busy, kept], [0, 2])
        assert predictor.launched == [[0], [2]]


class LateReader(FakePredictor):
    """A predictor that reads the pictures at the end of its computation."""

    def predict(self, images: Any, requests: Any) -> Any:
        self.entered.release()
        assert self.gate.wait(PATIENCE)
        return super().predict(images, requests)


@on_a_loop
async def test_a_cancelled_picture_keeps_its_buffer() -> None:
    async with running(predictor=LateReader) as service:
        model = await service.worker()
        predictor = service.devices[0].predictors["configured"]
        predictor.gate.clear()
        launched = ask(model, 1)
        await predictor.wait_until_busy()
        waiting = ask(model, 2)
        await until(lambda: service.devices[0].model.current.engine.status.queue_depth == 1)
        for left in (launched, waiting):
            left.cancel()
        await until(lambda: len(model.engines[0].pending) == 1)  # the engine reads the first
        answers = [ask(model, red) for red in (3, 4)]
        await until(lambda: service.devices[0].model.current.engine.status.queue_depth == 2)
        predictor.gate.set()
        await check(answers, [3, 4])
        assert predictor.launched == [[1], [3, 4]]
        assert not model.engines[0].pending


@on_a_loop
async def test_pictures_without_a_buffer_are_sent() -> None:
    async with running() as service:
        picture = pixels(0).nbytes
        service.devices[0].shared = service.devices[0].shared[: 2 * picture]
        model = await service.worker()
        predictor = service.devices[0].predictors["configured"]
        predictor.gate.clear()
        answers = [ask(model, red) for red in range(10)]
        await until(lambda: len(model.engines[0].pending) == 10)
        predictor.gate.set()
        await check(answers, range(10))


@on_a_loop
async def test_requests_of_a_dead_engine_fail() -> None:
    async with running() as service:
        model = await service.worker()
        [device] = service.devices
        device.predictors["configured"].gate.clear()
        lost = ask(model, 1)
        await device.predictors["configured"].wait_until_busy()
        dying = asyncio.create_task(device.die())
        with pytest.raises(EngineUnavailable, match="the engine ended and is being restarted"):
            await lost
        with pytest.raises(EngineUnavailable, match="the engine ended"):
            await ask(model, 2)
        device.predictors["configured"].gate.set()
        await dying
        await device.start()
        await until(lambda: model.default.current.engine.ready)
        await check([ask(model, 3)], [3])
        assert service.changes[-1] == "configured"


@on_a_loop
async def test_the_least_loaded_engine_gets_images() -> None:
    async with running(engines=2) as service:
        model = await service.worker()
        one, other = (device.predictors["configured"] for device in service.devices)
        one.gate.clear()
        other.gate.clear()
        answers = [ask(model, red) for red in range(6)]
        await until(lambda: [len(engine.pending) for engine in model.engines] == [3, 3])
        one.gate.set()
        await until(lambda: not model.engines[0].pending)
        answers += [ask(model, red) for red in (6, 7)]
        await until(lambda: sum(map(len, one.launched)) == 5)
        other.gate.set()
        await check(answers, range(8))
        await service.devices[0].die()
        await until(lambda: model.engines[0].status.state == "failed")
        await check([ask(model, red) for red in range(4)], range(4))
        await service.devices[0].start()


def show_silence(engine: EngineClient) -> None:
    """Pretend that 3 s pass without a heartbeat."""
    for _ in range(6):
        engine.check()


@on_a_loop
async def test_requests_avoid_a_silent_engine() -> None:
    async with running(engines=2, refresh_seconds=PATIENCE) as service:
        model = await service.worker()
        silent, other = model.engines
        show_silence(silent)
        assert (silent.status.state, other.status.state) == ("failed", "ready")
        await check([ask(model, red) for red in range(4)], range(4))
        assert service.devices[0].predictors["configured"].launched == []
        for worker in service.devices[0].server.workers:
            worker.send(frames.Alive())
        await until(lambda: silent.status.state == "ready")
        await check([ask(model, red) for red in range(4)], range(4))
        assert len(service.devices[0].predictors["configured"].launched) > 0


@on_a_loop
async def test_a_lone_silent_engine_refuses() -> None:
    async with running(refresh_seconds=PATIENCE) as service:
        model = await service.worker()
        [engine] = model.engines
        store = RemoteImageStore(engine)
        assert await store.get("nobody") is None  # all earlier frames have come before the answer
        show_silence(engine)
        assert service.changes[-1] == "the engine gives no sign of life"
        # The load comes last: it is discarded, and the answer to that is a sign of life.
        for refused in (ask(model, 1), model.load(None), model.put("other", None)):
            with pytest.raises(EngineUnavailable, match="no sign of life"):
                await refused


@on_a_loop
async def test_an_engine_gives_signs_of_life() -> None:
    async with running() as service:
        model = await service.worker()
        [engine] = model.engines
        for _ in range(3):
            show_silence(engine)
            assert engine.is_silent
            await until(lambda: not engine.is_silent)


@on_a_loop
async def test_cancellation_reaches_the_engine() -> None:
    async with running() as service:
        model = await service.worker()
        predictor = service.devices[0].predictors["configured"]
        predictor.gate.clear()
        busy = ask(model, 0)
        await predictor.wait_until_busy()
        leaves = ask(model, 1)
        stays = ask(model, 2)
        await until(lambda: service.devices[0].model.current.engine.status.queue_depth == 2)
        leaves.cancel()
        await until(lambda: service.devices[0].model.current.engine.status.queue_depth == 1)
        predictor.gate.set()
        await check([busy, stays], [0, 2])
        assert predictor.launched == [[0], [2]]
        assert not model.engines[0].pending


@on_a_loop
async def test_every_worker_finds_a_kept_picture() -> None:
    async with running() as service:
        stores = [RemoteImageStore((await service.worker()).engines[0]) for _ in range(2)]
        picture = ModelInput(pixels(9), Region(1, 2, 3, 4))
        image_id = new_image_id()
        assert await stores[0].put(picture, image_id)
        assert image_id is not None
        assert await stores[0].put(ModelInput(pixels(8), Region(1, 2, 3, 4)), new_image_id())
        for store in stores:
            found = await store.get(image_id)
            assert found is not None
            assert (found.region, found.pixels.tolist()) == (
                picture.region,
                picture.pixels.tolist(),
            )
            assert await store.get("nobody") is None
        await until(lambda: all(store.usage().pictures == 2 for store in stores))
        await service.devices[0].die()
        await until(lambda: service.workers[0].engines[0].status.state == "failed")
        assert (await stores[0].put(picture, "id"), await stores[0].get(image_id)) == (False, None)
        await service.devices[0].start()


# Swaps


@on_a_loop
async def test_all_engines_swap_to_the_next_model() -> None:
    async with running(engines=2) as service:
        leads, follows = [await service.worker() for _ in range(2)]
        old = follows.default.current
        with holding(old):
            await load(leads, "next")
            assert [name_of(worker) for worker in service.workers] == ["next", "next"]
            assert leads.default.current.number == follows.default.current.number == 2
            before = await old.engine.infer(request_for(4), timeout=PATIENCE)
            assert before.outputs.indices.tolist() == expected_indices(4, 3)
            assert [4] in [
                batch
                for each in service.devices
                for batch in each.predictors["configured"].launched
            ]
            await check([ask(worker, 5) for worker in service.workers], [5, 5])
            assert (
                sum(sum(map(len, each.predictors["next"].launched)) for each in service.devices)
                == 2
            )
            assert all(len(each.model.versions.open) == 2 for each in service.devices)
        await until(lambda: all(len(each.model.versions.open) == 1 for each in service.devices))
        await until(lambda: follows.results == {"loaded": 2, "served": 1})
        follows.reload()
        await until(lambda: [name_of(worker) for worker in service.workers] == ["configured"] * 2)


@on_a_loop
async def test_one_engine_refuses_a_swap_for_all() -> None:
    async with running(engines=2) as service:
        model = await service.worker()
        service.devices[1].broken = {"bad"}
        with pytest.raises(CheckpointRefused, match="bad: no such file"):
            await load(model, "bad")
        assert name_of(model) == "configured"
        assert all(
            not each.models._load_lock.locked() and len(each.model.versions.open) == 1
            for each in service.devices
        )
        await until(
            lambda: (model.results.get("refused"), list(model.reloads().values())) == (1, [False])
        )
        await load(model, "good")
        assert name_of(model) == "good"


@on_a_loop
async def test_engines_serve_only_equal_content() -> None:
    async with running(engines=2) as service:
        model = await service.worker()
        for device, checkpoint in zip(service.devices, ["one", "other"], strict=True):
            await device.models.put(
                device.models.name_of(""), checkpoint
            )  # each by itself, under the same number
            await until(lambda: name_of(model) == "one")
        await until(lambda: numbers(model) == [{2}, {2}])
        await check([ask(model, red) for red in range(6)], range(6))
        assert service.devices[1].predictors["other"].launched == []


@on_a_loop
async def test_a_lone_engine_may_bring_new_content() -> None:
    async with running() as service:
        model = await service.worker()
        await service.devices[0].die()
        await service.devices[0].start("changed")
        await until(lambda: name_of(model) == "changed")
        await check([ask(model, 1)], [1])


@on_a_loop
async def test_second_concurrent_swap_is_refused() -> None:
    async with running() as service:
        first, second = [await service.worker() for _ in range(2)]
        [device] = service.devices
        device.gate.clear()
        loading = asyncio.create_task(load(first, "next"))
        await until(device.models._load_lock.locked)
        for model in (first, second):
            with pytest.raises(SwapUnderWay):
                await load(model, "other")
        device.gate.set()
        await loading
        assert name_of(second) == "next"


@pytest.mark.parametrize("loaded", [False, True], ids=["loading", "loaded"])
@on_a_loop
async def test_swap_of_a_dead_worker_is_discarded(loaded: bool) -> None:
    async with running() as service:
        dies, stays = [await service.worker() for _ in range(2)]
        [device] = service.devices
        if not loaded:
            device.gate.clear()
        asking = asyncio.create_task(dies.engines[0].ask(frames.Change("load_next", "", "next")))
        await until(device.models._load_lock.locked)
        if loaded:
            await asking
        await dies.close()
        await until(lambda: not device.models._load_lock.locked())
        device.gate.set()
        asking.cancel()
        await load(stays, "other")
        assert name_of(stays) == "other"


@on_a_loop
async def test_a_dead_worker_ends_no_take_over() -> None:
    async with running() as service:
        leads, stays = [await service.worker() for _ in range(2)]
        [device] = service.devices
        before = device.model.current
        others = set(device.server.workers)
        await leads.engines[0].ask(frames.Change("load_next", "", "next"))
        leader = next(worker for worker in others if worker._swap is not None)
        leader.handle(frames.Call(0, frames.Change("take_over", "")))
        await asyncio.sleep(0)  # the version takes over, and its load is not over
        await leader.close()
        await until(lambda: before.state == "closed")
        assert name_of(stays) == "next"
        await load(stays, "other")


@on_a_loop
async def test_engine_death_in_a_load_ends_a_swap() -> None:
    async with running(engines=2) as service:
        model = await service.worker()
        service.devices[1].gate.clear()
        loading = asyncio.create_task(load(model, "next"))
        await until(service.devices[1].models._load_lock.locked)
        dying = asyncio.create_task(service.devices[1].die())
        with pytest.raises(EngineUnavailable):
            await loading
        assert not service.devices[0].models._load_lock.locked()
        service.devices[1].gate.set()
        await dying
        await service.devices[1].start()
        await until(lambda: all(engine.leases for engine in model.engines))
        await load(model, "next")
        await service.devices[1].die()
        await service.devices[1].start("next", version=2)
        await until(lambda: numbers(model) == [{2}, {2}])
        await check([ask(model, red) for red in range(4)], range(4))
        assert service.devices[1].predictors["next"].launched != []


@on_a_loop
async def test_deletion_answers_waiting_requests() -> None:
    async with running() as service:
        model = await service.worker()
        [device] = service.devices
        await model.put("other", {"checkpoint": "other"})
        await model.unload("other")
        device.gate.clear()
        with model.acquire("other") as lease:
            waiting = asyncio.create_task(lease.load(model, "caller"))
            await until(device.models._load_lock.locked)
            deleting = asyncio.create_task(model.delete("other"))
            await asyncio.sleep(0.01)
            device.gate.set()
            await asyncio.gather(waiting, deleting)
            await lease.engine.infer(request_for(1), timeout=PATIENCE)
        with pytest.raises(UnknownModel):
            model.acquire("other")


@on_a_loop
async def test_wait_survives_an_early_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as service:
        model = await service.worker()
        await model.put("other", {"checkpoint": "other"})
        await model.unload("other")
        engine = service.devices[0].models
        load = engine.load
        unloading = list[asyncio.Task[None]]()

        async def load_for_a_moment(name: str | None, caller: str = "") -> None:
            await load(name, caller)
            unloading.append(asyncio.create_task(engine.unload("other")))

        monkeypatch.setattr(engine, "load", load_for_a_moment)
        with model.acquire("other") as lease:
            await lease.load(model, "caller")
            await until(lambda: model.served["other"].current is not lease.version)
            await lease.engine.infer(request_for(1), timeout=PATIENCE)


@on_a_loop
async def test_arriving_request_keeps_a_model_busy() -> None:
    async with running() as service:
        model = await service.worker()
        other = await service.worker()
        await model.put("other", {"checkpoint": "other"})
        await until(lambda: all("other" in each.served for each in (model, other)))
        await until(
            lambda: all(each.served["other"].current.engine.ready for each in (model, other))
        )
        version = service.devices[0].models.served["other"].current

        def works() -> bool:
            return version.requests > 0

        with holding(other.served["other"].current):
            await until(works)
            with holding(other.served["other"].current):
                pass
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await until(lambda: not works())
        await until(lambda: not works())
        assert version.grants == 2


@pytest.mark.parametrize("changes", [["delete"], ["put"], ["delete", "put"]], ids="-".join)
@on_a_loop
async def test_admitted_request_outlives_its_model(
    changes: list[str],
) -> None:
    async with running() as service:
        leads, model = [await service.worker() for _ in range(2)]
        await leads.put("other", {"checkpoint": "other"})
        await until(lambda: "other" in model.served and model.served["other"].state == "ready")
        admitted = model.served["other"].current
        [device] = service.devices
        with holding(admitted):  # whose picture is being read
            version = device.models.served["other"].current
            await until(lambda: version.requests)
            for change in changes:
                await (
                    leads.delete("other")
                    if change == "delete"
                    else leads.put("other", {"checkpoint": "next"})
                )
                await until(lambda put=change == "put": ("other" in model.served) == put)  # type: ignore[misc]
            result = await admitted.engine.infer(request_for(5), timeout=PATIENCE)
            assert result.outputs.indices.tolist() == expected_indices(5, 3)
            assert device.predictors["other"].launched == [[5]]
        await until(lambda: not version.grants)


@on_a_loop
async def test_deletion_during_a_load_wins() -> None:
    async with running() as service:
        model = await service.worker()
        await model.put("other", {"checkpoint": "other"})
        [device] = service.devices
        with holding(model.served["other"].current):
            device.gate.clear()
            replacing = asyncio.create_task(model.put("other", {"checkpoint": "next"}))
            await until(device.models._load_lock.locked)
            await model.delete("other")
            device.gate.set()
            assert not await replacing
        assert set(model.served) == set(device.models.served) == {""}


@on_a_loop
async def test_invalid_frames_end_one_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as service:
        model = await service.worker()
        for nonsense in (
            b"\1\0\0\0\xc0",
            frames.encode(frames.Reply(1, None)),
            b"\xff\xff\xff\xff",
        ):
            reader, writer = await asyncio.open_unix_connection(service.devices[0].path)
            writer.write(nonsense)
            await reader.read()  # to the end
            writer.close()
        assert caplog.text.count("connection of a worker") == 3
        await check([ask(model, 1)], [1])


@on_a_loop
async def test_a_refused_picture_takes_no_buffer() -> None:
    buffers = SharedPixels(shared_memory(1), 0)
    client = EngineClient(Path("nowhere"), "cpu", buffers)
    with pytest.raises(EngineUnavailable, match="the model is loading"):
        client.put(pixels(1))
    assert buffers.put(pixels(1)) == 0  # the first one


@on_a_loop
async def test_names_wait_for_the_first_engine() -> None:
    models = RemoteModels([EngineClient(Path("nowhere"), "cpu", NO_BUFFERS)])
    with pytest.raises(EngineUnavailable, match="the model is loading"):
        models.key("birds")


@on_a_loop
async def test_a_recall_revives_no_old_version() -> None:
    client = EngineClient(Path("nowhere"), "cpu", NO_BUFFERS)
    sent = list[frames.Frame]()
    status = replace(client.status, state="ready")
    client.published = frames.StatusChanged(status, client.published.kept, {}, {})
    client.send = sent.append  # type: ignore[method-assign, assignment]
    model = RemoteModel([client], "m")
    client._on_change = model.refresh
    with holding(model.current):
        waiting = model.current
        client._receive(frames.Granted(1, "m", 1, model_info()))
        assert waiting.engine.ready, "a request that waits has the next version at once"
        for frame in (
            frames.Granted(2, "m", 2, model_info()),
            frames.Recalled(1, "m"),
            frames.Recalled(2, "m"),
        ):
            client._receive(frame)
        assert not model.current.engine.ready
        assert frames.Returned(2) in sent
        assert frames.Returned(1) not in sent
    assert sent[-1] == frames.Returned(1)


@on_a_loop
async def test_one_engine_alone_evicts_a_model() -> None:
    async with running(engines=2) as service:
        model = await service.worker()
        await model.put("other", {"checkpoint": "other"})
        evicts, stays = service.devices
        await evicts.models.unload("other")
        assert len(evicts.models.served["other"].versions.open) == 1
        await evicts.models.load("other")
        await until(lambda: len(model.served["other"].current.engine.engines) == 2)
        assert len(stays.models.served["other"].versions.open) == 1
