"""Pictures kept in a real Redis: shared by replicas, for their time, within their bytes."""

import asyncio
import shutil
import signal
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.images.preprocess import ModelInput, Region
from service.extensions.redis import image_store
from service.extensions.redis.image_store import RedisImageStore
from service.web.image_stores import new_image_id
from tests.service.fakes import PATIENCE, on_a_loop, png
from tests.service.web.apps import Clock, app, service_in

redis = pytest.importorskip("redis", reason="the package redis is not installed")

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


ID = "A" * 22
COST = 20 * 20 * 3 + 44 + 512
"""Bytes of a picture: its pixels, their head, and what Redis has for itself."""


class Redis:
    """A server that listens on a socket in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.start()

    def start(self) -> None:
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "save": "",
            "dir": str(self.socket.parent),
        }
        command = [
            "redis-server",
            *(word for name, value in options.items() for word in (f"--{name}", value)),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = redis.Redis.from_url(
            self.url, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.01), 3000)
        )
        assert client.ping()
        client.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    server = Redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer of Redis may take longer than a service waits for it."""
    monkeypatch.setattr(image_store, "TIMEOUT_SECONDS", PATIENCE)


@pytest.fixture
def server(shared_server: Redis, patient: None) -> Redis:
    client = redis.Redis.from_url(shared_server.url)
    client.flushall()
    client.close()
    return shared_server


def picture(value: int, side: int = 20) -> ModelInput:
    return ModelInput(np.full((side, side, 3), value, np.uint8), Region(1.5, 2, 30, 40))


@asynccontextmanager
async def stores(
    server: Redis, count: int = 2, **changes: Any
) -> AsyncIterator[list[RedisImageStore]]:
    """Those of several replicas."""
    options: dict[str, Any] = {
        "name": "cats",
        "ttl": 60,
        "max_bytes": 1 << 20,
        "failed": lambda: None,
        "on_evicted": lambda age: None,
    } | changes
    made = [RedisImageStore(server.url, **options) for _ in range(count)]
    try:
        yield made
    finally:
        for store in made:
            await store.close()


async def put(store: RedisImageStore, kept: ModelInput) -> str:
    image_id = new_image_id()
    assert await store.put(kept, image_id)
    return image_id


@on_a_loop
async def test_replicas_share_pictures(server: Redis) -> None:
    async with stores(server) as (one, two):
        ids = {value: await put(one if value % 2 else two, picture(value)) for value in range(5)}
        for value, image_id in ids.items():
            for store in (one, two):
                found = await store.get(image_id)
                assert found is not None
                np.testing.assert_array_equal(found.pixels, picture(value).pixels)
                assert found.region == Region(1.5, 2, 30, 40)
        assert two.usage().pictures == 5
        assert len(set(ids.values())) == 5


@on_a_loop
async def test_full_store_evicts_the_oldest(server: Redis) -> None:
    async with stores(server, max_bytes=10_000) as (one, two):
        ids = [await put(one if value % 2 else two, picture(value)) for value in range(20)]
        alive = [await one.get(image_id) is not None for image_id in ids]
        usage = two.usage() if two.usage().evicted > one.usage().evicted else one.usage()
        assert 2 <= usage.pictures <= 10_000 // 1200
        assert usage.size == usage.pictures * COST
        assert usage.evicted == 20 - usage.pictures
        assert alive == [False] * (20 - usage.pictures) + [True] * usage.pictures


@on_a_loop
async def test_bytes_limit_pictures_of_all_sizes(server: Redis) -> None:
    small = COST
    large = 40 * 40 * 3 + 44 + 512
    limit = 2 * large + small
    async with stores(server, max_bytes=limit) as (one, two):
        for value in range(4):
            await put(one, picture(value, side=40))
        last_large = await put(two, picture(5, side=40))
        ids = [await put(one, picture(value)) for value in range(limit // small)]
        assert one.usage() == (limit // small, limit // small * small, 5)
        assert await one.get(last_large) is None
        assert all([await two.get(image_id) is not None for image_id in ids])
        await put(two, picture(9, side=40))
        assert two.usage().size <= limit
        assert await one.get(ids[-1]) is not None


@on_a_loop
async def test_picture_stored_twice_counts_once(server: Redis) -> None:
    async with stores(server, max_bytes=3 * COST) as (one, two):
        for store in (one, two, one):
            await store.put(picture(1), ID)
        assert one.usage() == (1, COST, 0)
        client = redis.Redis.from_url(server.url)
        client.delete(*client.keys("*bytes"))  # as Redis does under its own limit of memory
        client.close()
        for value in range(4):
            await put(two, picture(value))
        assert two.usage() == (3, 3 * COST, 2)


@on_a_loop
async def test_evicting_replica_observes_ages(server: Redis) -> None:
    ages: list[float] = []
    async with stores(server, max_bytes=2 * COST, on_evicted=ages.append) as (one, two):
        for value in range(2):
            await put(one, picture(value))
        await asyncio.sleep(0.2)
        for value in range(2):
            await put(two, picture(value))

    assert len(ages) == 2
    assert all(0.2 <= age < PATIENCE for age in ages)


@on_a_loop
async def test_picture_expires_after_its_ttl(server: Redis) -> None:
    async with stores(server, 1, ttl=0.05) as (store,):
        image_id = await put(store, picture(1))
        while await store.get(image_id) is not None:
            await asyncio.sleep(0.005)
        await put(store, picture(2))
        assert store.usage().pictures == 1
        assert store.usage().evicted == 0
    client = redis.Redis.from_url(server.url)
    assert all(0 < client.pttl(key) <= 50 for key in client.scan_iter("*order*")), (
        "keys that nobody asks for go too"
    )
    client.close()


@on_a_loop
async def test_zero_limits_store_nothing(server: Redis) -> None:
    failures: list[None] = []
    for changes in ({"ttl": 0}, {"max_bytes": 0}, {"max_bytes": 1000}, {"max_bytes": COST - 1}):
        async with stores(server, 1, failed=lambda: failures.append(None), **changes) as (store,):
            assert not await store.put(picture(1), ID)
    assert failures == []
    async with stores(server, 1, max_bytes=COST) as (store,):
        for value in (1, 2):
            assert await store.get(await put(store, picture(value))) is not None
        assert store.usage() == (1, COST, 1)


@on_a_loop
@pytest.mark.usefixtures("patient")
async def test_without_redis_answers_lack_the_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Redis(tmp_path)
    clock = Clock()
    service = app(clock, recent_url=server.url, recent_ttl=60)
    first = (await service.classify(png(1))).json
    assert (await service.get("/attention", f"id={first['id']}&method=cls")).status == 200
    server.stop()
    for failures in (1, 2):
        answer = await service.classify(png(2))
        assert answer.status == 200
        assert "id" not in answer.json
        assert service.metric("vit_recent_errors_total") == failures
    [line] = [
        message
        for message in caplog.messages
        if message.startswith("kept pictures: Redis does not answer: ")
    ]
    assert server.url.removeprefix("unix://") in line
    assert (await service.get("/attention", f"id={first['id']}")).status == 404
    server.start()
    clock.now += 0.9
    assert "id" not in (await service.classify(png(3))).json  # it is left alone for a second
    clock.now += 0.1
    assert "id" in (await service.classify(png(3))).json
    server.stop()


SIZES = struct.Struct("<3I4d")


@on_a_loop
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"x",
        SIZES.pack(8, 8, 3, 0, 0, 8, 8) + bytes(8 * 8 * 3 - 1),
        SIZES.pack(1 << 31, 1 << 31, 1 << 31, 0, 0, 8, 8) + bytes(100),
        SIZES.pack(0, 0, 0, 0, 0, 8, 8),
        SIZES.pack(9, 9, 3, 0, 0, 9, 9) + bytes(9 * 9 * 3),
        SIZES.pack(8, 8, 1, 0, 0, 8, 8) + bytes(8 * 8),
    ],
    ids=["empty", "short", "truncated", "huge", "of no size", "of another model", "of one channel"],
)
async def test_damaged_value_is_not_found(server: Redis, value: bytes) -> None:
    service = app(recent_url=server.url, recent_ttl=60)
    image_id = (await service.classify(png(1))).json["id"]
    client = redis.Redis.from_url(server.url)
    [key] = client.keys("*picture:*")
    client.set(key, value)
    client.close()
    for query in ("method=cls&format=json", "format=png"):
        assert (await service.get("/attention", f"id={image_id}&{query}")).status == 404
    assert "id" in (await service.classify(png(2))).json


@on_a_loop
async def test_silent_redis_delays_one_request(
    tmp_path: Path,
) -> None:
    async def listen(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            pass

    path = str(tmp_path / "socket")
    service = app(Clock(), recent_url=f"unix://{path}", recent_ttl=60)
    async with await asyncio.start_unix_server(listen, path):
        started = asyncio.get_running_loop().time()
        answers = [await service.classify(png(1)) for _ in range(5)]
        seconds = asyncio.get_running_loop().time() - started
        await service_in(service).images.close()
    assert ["id" in answer.json for answer in answers] == [False] * 5
    assert 0.25 <= seconds < 5 * 0.25, "the first waits, and the others leave Redis alone"


@on_a_loop
async def test_one_request_probes_a_frozen_redis(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Redis(tmp_path)
    clock = Clock()
    failures: list[None] = []
    async with stores(server, 1, clock=clock, failed=lambda: failures.append(None)) as (store,):
        server.process.send_signal(signal.SIGSTOP)
        for pause in (1, 2, 4, 8, 8):
            caplog.clear()
            assert not any(await asyncio.gather(*(store.put(picture(1), ID) for _ in range(20))))
            assert len(caplog.messages) == 1, "all wait for the same answer at most"
            clock.now += pause - 0.1
            assert not await store.put(picture(1), ID)
            assert len(caplog.messages) == 1
            clock.now += 0.1
        assert len(failures) == 5 * 21
        server.process.send_signal(signal.SIGCONT)
        while not await store.put(picture(2), ID):
            clock.now += 8
        assert all(await asyncio.gather(*(store.put(picture(3), ID) for _ in range(5))))
    server.stop()
