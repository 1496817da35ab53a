"""`serve run` with two replicas, on a local Ray."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import REPOSITORY
from tests.e2e.serving import Pictures, client, together
from tests.launcher import PATIENCE, free_port, until

pytest.importorskip("ray.serve", reason="ray[serve] is not installed")

import ray
from ray import serve

from service.extensions.ray.replicas import app

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ARGUMENTS = {"replicas": 2, "cpus": 0.4}
"""Two replicas and their two successors share two cores."""


class Service:
    """The service on Ray, for clients."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.client = client(url)
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def classify(self, picture: bytes, query: str = "") -> httpx.Response:
        return self.client.post(
            f"/classify?{query}", content=picture, headers={"Content-Type": "image/png"}
        )

    def images(self) -> dict[str, float]:
        """Return the number of images that each replica classified; empty without replicas."""
        answer = self.client.get("/metrics")
        families = text_string_to_metric_families(answer.text if answer.status_code == 200 else "")
        samples = (
            sample
            for family in families
            for sample in family.samples
            if sample.name == "vit_images_total"
        )
        return {sample.labels["replica"]: sample.value for sample in samples}

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return len(self.images()) == ARGUMENTS["replicas"]
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def settings(checkpoint: Path) -> Iterator[None]:
    """Return the environment of the tests' applications; an incomplete batch waits for a moment."""
    values = {
        "checkpoint": checkpoint,
        "device": "cpu",
        "dtype": "float32",
        "request_timeout": 60,
        "max_delay_ms": 100,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("VIT_")]:
            patch.delenv(name)
        for name, value in values.items():
            patch.setenv(f"VIT_{name.upper()}", str(value))
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Return the address of a Ray on this machine, which starts without the settings."""
    # The path of a socket in the folder must be short.
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token to the home folder
        context = ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()


@pytest.fixture(scope="module")
def service(
    cluster: str, settings: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    port = free_port()
    serve.start(
        http_options={"port": port}
    )  # `serve run` joins a running instance, and lacks a flag for the port
    log = tmp_path_factory.mktemp("ray") / "serve.log"
    application = [
        "service.extensions.ray.replicas:app",
        *(f"{name}={value}" for name, value in ARGUMENTS.items()),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [Path(sys.executable).parent / "serve", "run", "--address", cluster, *application],
            cwd=REPOSITORY,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    service = Service(f"http://127.0.0.1:{port}", process, log)
    try:
        until(service.is_ready)
        yield service
    finally:
        service.client.close()
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    socket = tmp_path / "redis.sock"
    process = subprocess.Popen(
        ["redis-server", "--port", "0", "--save", "", "--unixsocket", socket]
    )
    until(socket.exists)
    yield f"unix://{socket}"
    process.kill()
    process.wait()


def test_metrics_count_answers_per_replica(service: Service, pictures: Pictures) -> None:
    before = service.images()
    answers = together(32, lambda index: service.classify(pictures.files[index], "top_k=10").json())
    for index, answer in enumerate(answers):
        pictures.check(index, answer)
    after = service.images()
    assert after.keys() == before.keys()
    assert all(after[replica] > before[replica] for replica in after)
    assert sum(after.values()) - sum(before.values()) == 32


def test_a_replica_that_is_killed_comes_back(service: Service, pictures: Pictures) -> None:
    victim = min(service.images())
    [actor] = [
        name["name"]
        for name in ray.util.list_named_actors(all_namespaces=True)
        if victim in name["name"]
    ]
    ray.kill(ray.get_actor(actor, namespace="serve"))
    until(lambda: service.is_ready() and victim not in service.images())
    for index in range(8):
        pictures.check(index, service.classify(pictures.files[index], "top_k=10").json())


def test_a_stopped_replica_loses_no_request(service: Service, pictures: Pictures) -> None:
    stop = threading.Event()

    def ask(index: int) -> int:
        answered = 0
        while not stop.is_set():
            pictures.check(index, service.classify(pictures.files[index], "top_k=10").json())
            answered += 1
        return answered

    assert len(service.images()) == 2
    with ThreadPoolExecutor(8) as pool:
        callers = [pool.submit(ask, index) for index in range(8)]
        try:
            serve.run(app({**ARGUMENTS, "replicas": 1}))
            until(lambda: len(service.images()) == 1)
        finally:
            stop.set()
        assert all(caller.result(PATIENCE) for caller in callers)


def test_redis_shares_pictures_of_replicas(
    service: Service, pictures: Pictures, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIT_RECENT_URL", redis_url)
    serve.run(app(ARGUMENTS))
    until(service.is_ready)
    picture = service.classify(pictures.files[0]).json()["id"]
    assert {service.client.get(f"/attention?id={picture}").status_code for _ in range(20)} == {200}
