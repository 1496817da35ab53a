"""Two web workers and an engine answer as one service; a killed process loses its own work."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.conftest import REPOSITORY
from tests.e2e.load import Load, connection
from tests.e2e.processes import Processes, is_gone, maps
from tests.e2e.serving import Pictures, Serve, Served, problem, together
from tests.launcher import PATIENCE, until

pytestmark = pytest.mark.timeout(180)  # servers start and end

WORKERS = 2
PLACES = 48


@pytest.fixture(scope="module")
def service(serve_module: Serve) -> Served:
    """Start a service with few slots; it is not forked, because only its engine has torch."""
    return serve_module(
        warm=False, workers=WORKERS, queue_size=PLACES, max_images_per_request=8, request_timeout=30
    )


def asks_every_worker(server: Served, path: str) -> list[httpx.Response]:
    """Return the answers on many new connections; the kernel chooses a worker for each."""
    answers = []
    for _ in range(12):
        with connection(server) as own:
            answers.append(own.get(path))
    return answers


# As one service


def test_only_the_engine_holds_torch(service: Served) -> None:
    processes = Processes(service)
    assert len(processes.workers) == WORKERS
    assert "libtorch" in maps(processes.engine)
    for pid in processes.workers:
        assert "libtorch" not in maps(pid)
        status = Path(f"/proc/{pid}/status").read_text()
        [resident] = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
        assert int(resident) < 130 * 1024


def test_workers_answer_as_one_service(service: Served, pictures: Pictures) -> None:
    before = {name: service.metric(name) for name in ("vit_images_total", "vit_batch_size_sum")}
    callers = 24
    rounds = 6
    barrier = threading.Barrier(callers)

    def call(number: int) -> None:
        with connection(service) as own:
            barrier.wait()
            for turn in range(rounds):
                index = (number + turn * callers) % len(pictures)
                response = own.post(
                    "/classify?top_k=10&attention=true",
                    content=pictures.files[index],
                    headers={"Content-Type": "image/png"},
                )
                assert response.status_code == 200, response.text
                pictures.check(index, response.json())
                assert abs(sum(map(sum, response.json()["attention"]["values"])) - 1) < 0.01

    together(callers, call)
    until(service.idle)
    for scrape in asks_every_worker(service, "/metrics"):
        service_metric = samples(scrape)
        for name, value in before.items():
            assert sum(service_metric(name)) == value + callers * rounds
        assert service_metric("vit_engine_up") == [1]
        assert "pid=" not in scrape.text


def samples(scrape: httpx.Response) -> Callable[[str], list[float]]:
    lines = [line.rpartition(" ") for line in scrape.text.splitlines() if not line.startswith("#")]
    return lambda name: [float(value) for key, _, value in lines if key.partition("{")[0] == name]


def test_workers_share_every_address(serve: Serve, pictures: Pictures, tmp_path: Path) -> None:
    path = tmp_path / "http"
    server = serve(workers=WORKERS, host=f"unix:{path},::")
    port = server.url.rpartition(":")[2]
    for _ in range(8):
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(
            transport=transport, base_url="http://any.example", timeout=PATIENCE
        ) as caller:
            pictures.check(0, caller.post("/classify", content=pictures.files[0]).json())
    for host in ("127.0.0.1", "[::1]"):
        assert httpx.get(f"http://{host}:{port}/healthz", trust_env=False).status_code == 200
    for host in (f"unix:{path},::", "::", "[::1]"):
        environment = {"VIT_HOST": host, "VIT_PORT": port}
        asked = subprocess.run(
            [sys.executable, REPOSITORY / "deploy/healthcheck.py"], env=environment, check=False
        )
        assert asked.returncode == 0, host
    assert server.process.terminate() == 0
    assert not path.exists()


def test_every_worker_finds_a_kept_picture(service: Served, pictures: Pictures) -> None:
    document = service.classify(pictures.files[5], "attention=true").json()
    for answer in asks_every_worker(service, f"{document['attention']['url']}&format=json"):
        assert answer.status_code == 200
        assert answer.json()["grid"] == document["attention"]["grid"]
        assert answer.json()["values"] == document["attention"]["values"]
    assert {
        answer.status_code for answer in asks_every_worker(service, "/attention?id=nobody")
    } == {404}


def test_workers_share_one_limit_of_slots(service: Served, pictures: Pictures) -> None:
    until(service.idle)
    before = service.metric("vit_rejected_total", reason="queue_full")
    engine = Processes(service).engine
    callers = 4 * PLACES  # each worker gets more than half of the slots

    def is_full() -> bool:
        refused = service.metric("vit_rejected_total", reason="queue_full") - before
        return refused == callers - PLACES and service.metric("vit_admitted_images") == PLACES

    with ExitStack() as stack:
        # One address would leave slots to others.
        sources = [f"127.0.0.{2 + index}" for index in range(callers)]
        connections = [stack.enter_context(service.raw(source)) for source in sources]
        # The supervisor is stopped too; otherwise it would replace the engine as frozen meanwhile.
        for pid in (service.process.process.pid, engine):
            os.kill(pid, signal.SIGSTOP)
            stack.callback(os.kill, pid, signal.SIGCONT)
        for caller in connections:
            caller.post(pictures.files[0])
        until(is_full)
        os.kill(engine, signal.SIGCONT)
        answers = [caller.answer() for caller in connections]
    answered = [json.loads(body) for status, _, body in answers if status == 200]
    assert (len(answered), {status for status, *_ in answers}) == (PLACES, {200, 503})
    for document in answered:
        pictures.check(0, document)
    assert service.classify(pictures.files[0]).status_code == 200


# Killed processes


def test_a_killed_worker_is_replaced(service: Served, pictures: Pictures) -> None:
    processes = Processes(service)
    victim = min(processes.workers)
    counted = service.metric("vit_images_total")
    with Load(service, pictures) as running:
        running.more()
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in processes.all and len(processes.all) == WORKERS + 1)
        running.more()
        outcomes = running.stop()
    assert set(outcomes) <= {
        "answered",
        "lost",
        "engine_unavailable",
    }  # a new worker first connects to the engine
    assert (
        "worker 0 ended with signal 9" in service.log
        or "worker 1 ended with signal 9" in service.log
    )
    until(service.idle)
    for scrape in asks_every_worker(service, "/metrics"):
        assert sum(samples(scrape)("vit_images_total")) >= counted + outcomes["answered"]
        assert samples(scrape)("vit_inflight_requests") == [0]


def test_a_killed_engine_is_started_again(service: Served, pictures: Pictures) -> None:
    processes = Processes(service)
    victim = processes.engine
    with Load(service, pictures) as running:
        running.more()
        os.kill(victim, signal.SIGKILL)
        running.until(lambda outcomes: outcomes["engine_unavailable"] > 0)
        answer = service.get("/readyz")
        assert answer.status_code == 200 or problem(answer) == (503, "engine_unavailable")
        until(lambda: service.get("/readyz").status_code == 200)
        running.more()
        outcomes = running.stop()
    assert set(outcomes) == {"answered", "engine_unavailable"}
    assert "engine cpu ended with signal 9: starting it again in 0 s" in service.log
    assert service.metric("vit_engine_restarts_total", device="cpu") == 1
    assert service.metric("vit_engine_up", device="cpu") == 1
    until(service.idle)


def test_a_frozen_engine_gets_no_requests(service: Served, pictures: Pictures) -> None:
    processes = Processes(service)
    victim = processes.engine
    os.kill(victim, signal.SIGSTOP)
    try:
        until(
            lambda: (
                {answer.status_code for answer in asks_every_worker(service, "/readyz")} == {503}
            )
        )
        with connection(service) as own:
            refused = own.post(
                "/classify", content=pictures.files[1], headers={"Content-Type": "image/png"}
            )
        assert problem(refused) == (503, "engine_unavailable")
        assert "no sign of life" in refused.json()["detail"]
        assert victim in processes.all
        assert "is frozen" not in service.log
    finally:
        os.kill(victim, signal.SIGCONT)
    until(lambda: {answer.status_code for answer in asks_every_worker(service, "/readyz")} == {200})
    assert processes.engine == victim


def test_frozen_processes_are_replaced(service: Served, pictures: Pictures) -> None:
    processes = Processes(service)
    victims = {processes.engine, min(processes.workers)}
    for victim in victims:
        os.kill(victim, signal.SIGSTOP)
    with connection(service) as own:
        try:
            refused = own.post(
                "/classify", content=pictures.files[1], headers={"Content-Type": "image/png"}
            )
            assert problem(refused) == (503, "engine_unavailable")
        except httpx.TransportError:  # the frozen worker had accepted it
            pass
    until(lambda: not victims & processes.all and len(processes.all) == WORKERS + 1)
    assert service.log.count("is frozen: no sign of life") == len(victims)
    until(lambda: {answer.status_code for answer in asks_every_worker(service, "/readyz")} == {200})
    with connection(service) as own:
        answer = own.post(
            "/classify", content=pictures.files[1], headers={"Content-Type": "image/png"}
        )
    pictures.check(1, answer.json())


# Stopped services


def test_no_process_outlives_its_supervisor(service: Served) -> None:
    """Stop the service; the last test of this module's service."""
    pids = Processes(service).all
    assert len(pids) == WORKERS + 1
    service.process.process.kill()
    until(lambda: all(is_gone(pid) for pid in pids))
