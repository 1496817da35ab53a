"""A service from start to stop: readiness, failed starts, later starts, and draining."""

import importlib.util
import json
import re
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.load import Load
from tests.e2e.processes import Processes, is_gone, maps
from tests.e2e.serving import LOG_LINE, Pictures, Serve, Served, problem
from tests.launcher import PATIENCE, VitserveProcess, free_port, listens, run_vitserve, until

pytestmark = pytest.mark.timeout(180)  # servers start and end


def end(server: Served, number: signal.Signals = signal.SIGTERM) -> None:
    server.process.process.send_signal(number)


def exit_code(server: Served) -> int:
    return server.process.process.wait(PATIENCE)


def is_draining(server: Served) -> bool:
    response = server.get("/readyz")
    return response.status_code == 503 and problem(response)[1] == "draining"


# Starting


HOLDS_CHECKPOINT = """
import os, pathlib, sys, time

gate = pathlib.Path(os.environ["GATE"])

def hold(event, arguments):
    while event == "open" and str(arguments[0]).endswith("config.json") and not gate.exists():
        time.sleep(0.02)

sys.addaudithook(hold)
"""
"""A module that Python runs at its start: it delays the checkpoint until the file GATE exists."""


def test_it_is_ready_only_after_loading(
    serve: Serve, pictures: Pictures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOLDS_CHECKPOINT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    port = free_port()
    server = serve(wait=False, port=port)
    server.connect(f"http://127.0.0.1:{port}")
    until(lambda: listens(port))
    response = server.get("/readyz")
    assert (
        problem(response)
        == problem(server.classify(pictures.files[0]))
        == (503, "engine_unavailable")
    )
    assert int(response.headers["retry-after"]) >= 1
    assert server.get("/healthz").status_code == 200
    (tmp_path / "gate").touch()
    until(lambda: server.get("/readyz").status_code == 200)
    pictures.check(0, server.classify(pictures.files[0]).json())


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_vitserve("serve", port=port, log_level="warning")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == (
        f"vitserve: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "--port (VIT_PORT) chooses another"
    )


def test_a_broken_checkpoint_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    del config["preprocess"]["mean"]
    (folder / "config.json").write_text(json.dumps(config))
    options = {"checkpoint": folder, "port": 0, "log_level": "warning"}
    with VitserveProcess(tmp_path / "log", "serve", warm=True, **options) as server:
        assert server.process.wait(PATIENCE) == 1
    line = server.log.strip()
    assert LOG_LINE.match(line)
    assert "CRITICAL cannot start: " in line
    assert "\n" not in line
    assert str(folder) in line
    assert "mean" in line


# Stopping


def test_an_open_service_warns_once(
    serve: Serve,
) -> None:
    server = serve(host="0.0.0.0")
    end(server, signal.SIGINT)
    assert exit_code(server) == 0
    assert server.log.count("VIT_HOST=0.0.0.0 without VIT_API_KEYS") == 1
    assert "container" not in server.log


@pytest.mark.parametrize("workers", [1, 2])
def test_a_drain_answers_accepted_requests(workers: int, serve: Serve, pictures: Pictures) -> None:
    """Connections are then refused. Accepted requests are answered, also with half of the body."""
    server = serve(workers=workers, drain_delay=2, request_timeout=30)
    pids = Processes(server).all
    folders = {
        Path(found) for pid in pids for found in re.findall(r"(/\S+/vitserve-\w+)/", maps(pid))
    }
    assert len(folders) == (workers > 1)
    with server.raw() as slow, server.raw() as idle, Load(server, pictures) as running:
        slow.post(pictures.files[1], sent=20)
        idle.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.answer()[0] == 200
        running.more()
        end(server)
        until(lambda: is_draining(server))
        running.more(count=10)
        assert set(running.outcomes) == {"answered"}
        assert server.classify(pictures.files[0]).headers["connection"] == "close"
        until(lambda: not listens(server.port))
        assert idle.is_closed()
        assert server.process.process.poll() is None

        slow.send(pictures.files[1][20:])
        status, headers, body = slow.answer()
        assert (status, headers["connection"]) == (200, "close")
        pictures.check(1, json.loads(body))
        outcomes = running.stop()
    assert set(outcomes) <= {"answered", "lost"}
    assert exit_code(server) == 0
    assert "Traceback" not in server.log
    assert "CRITICAL" not in server.log
    told = re.search(r"stopped: .* (\d+) requests were answered and 0 refused$", server.log.strip())
    assert told is not None
    assert 0 < int(told[1]) < outcomes["answered"]
    assert all(is_gone(pid) for pid in pids)
    assert not any(folder.exists() for folder in folders)


def holds_torch(server: Served) -> bool:
    return "libtorch" in Path(f"/proc/{server.process.process.pid}/maps").read_text()


@pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="openvino is not installed"
)
def test_a_second_start_holds_no_torch(serve: Serve, pictures: Pictures, tmp_path: Path) -> None:
    files = pictures.files[:4]
    queries = ["top_k=5", "attention=relevance", "attention=true"]

    def answers(server: Served) -> list[object]:
        found: list[object] = []
        for query in queries:
            for file in files:
                answer = server.classify(file, query).raise_for_status().json()
                found.append(
                    (answer["predictions"], (answer.get("attention") or {}) | {"url": None})
                )
        return found

    def kept() -> int:
        return len(list((tmp_path / "cache" / "graphs").glob("[0-9a-f]*/manifest.json")))

    first = serve(compile="auto", cache_dir=tmp_path / "cache")
    answers(first)  # which compiles the graph of relevance
    until(lambda: kept() == 2)
    content = first.get("/model").json()["content"]

    second = serve(warm=False, compile="auto", cache_dir=tmp_path / "cache")
    expected = answers(second)
    until(
        lambda: answers(first) == expected
    )  # torch must have confirmed the graph before it computes
    first.process.terminate()
    assert second.get("/model").json()["content"] == content
    assert second.get("/model").json()["backend"].startswith("openvino")
    assert not holds_torch(second)
    # While torch loads for one client, others get answers.
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(second.client.post, "/attention?method=gae", content=files[0])
        while not slow.done():
            second.classify(files[1]).raise_for_status()
        slow.result().raise_for_status()
    assert holds_torch(second)
    assert answers(second) == expected
