"""Count the files that one POST /classify passes in one process; a reader follows as many."""

import http.client
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from service.draining import Lifecycle
from service.engine.backbones import Backbones
from service.engine.loading import load_predictor
from service.models.local_models import LocalModels
from service.observe.metrics import Metrics
from service.server import Server
from service.settings import Settings, load_settings
from service.web.app import create_app
from tests.e2e.checkpoints import write_checkpoint
from tests.launcher import until
from tests.model.images.pictures import encode, noise

REPOSITORY = Path(__file__).parents[3]
MOST = {"service": 23, "model": 13}
"""Largest number of files per package."""


class Recorder:
    """Record, while `on`, the files of `service` and `model` whose functions any thread calls."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call":
            self.files.add(frame.f_code.co_filename)


def passed(files: set[str]) -> list[str]:
    """Return the files of the service and the model, relative to the repository."""
    paths = (Path(file) for file in files)
    named = (path.relative_to(REPOSITORY) for path in paths if path.is_relative_to(REPOSITORY))
    return sorted(str(path) for path in named if path.parts[0] in ("service", "model"))


def files_passed(settings: Settings) -> list[str]:
    """Serve in this process, warm up, and return the files of a later request.

    Background work appears only in some of the records.
    """
    recorder = Recorder()
    lifecycle = Lifecycle()
    metrics = Metrics()
    requests: list[set[str]] = []
    sys.setprofile(recorder)
    threading.setprofile(recorder)
    try:
        models = LocalModels(
            settings, Backbones(settings, load_predictor, metrics.observe_batch).engine
        )
        server = Server(create_app(settings, models, metrics, lifecycle), settings, lifecycle)

        def classify(connection: http.client.HTTPConnection) -> None:
            connection.request(
                "POST", "/classify", encode(noise(64, 48), "JPEG"), {"Content-Type": "image/jpeg"}
            )
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()

        def call() -> None:
            try:
                until(lambda: server.is_listening and models.default.state == "ready")
                connection = http.client.HTTPConnection("127.0.0.1", server.port)
                for _ in range(3):
                    classify(connection)
                for _ in range(5):
                    recorder.files = set()
                    recorder.on = True
                    classify(connection)
                    recorder.on = False
                    requests.append(recorder.files)
                connection.close()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        caller = threading.Thread(target=call)
        caller.start()
        server.run()
        caller.join()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return passed(set.intersection(*requests))


def test_a_request_passes_few_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", "tiny", (16, 16), ("a", "b", "c"), 0)
    files = files_passed(
        load_settings({"checkpoint": str(folder), "host": "127.0.0.1", "port": 0, "drain_delay": 0})
    )
    assert "service/http/connection.py" in files, "the recorder sees the event loop"
    assert "service/engine/streams.py" in files, "the recorder sees the engine's threads"
    assert "model/images/preprocess.py" in files, "the recorder sees the decode threads"
    counts = {package: sum(file.startswith(f"{package}/") for file in files) for package in MOST}
    assert all(counts[package] <= most for package, most in MOST.items()), "\n".join(files)
