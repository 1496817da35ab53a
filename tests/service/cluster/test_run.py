"""What the processes of one service do beside their requests: their shares, their metrics, how an engine ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from model.errors import CheckpointError, NewProcessNeeded
from service.cluster.engine_process import STOP, _run
from service.cluster.processes import SERVING, Report
from service.cluster.run import Cluster
from service.cluster.supervisor import TRY_AGAIN, Child
from service.cluster.worker import share, worker_settings
from service.errors import SettingsError
from service.models.models import Version
from service.observe.metrics import Metrics
from service.settings import load_settings
from tests.service.cluster.scripts import run
from tests.service.fakes import FakePredictor, model_info, on_a_loop


@pytest.mark.parametrize(("total", "workers"), [(256, 8), (256, 3), (5, 5), (0, 2)])
def test_shares_of_all_workers_are_what_they_may_take_together(total: int, workers: int) -> None:
    settings = load_settings({"workers": workers})
    shares = [share(total, index, settings) for index in range(workers)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_a_share_has_room_for_one_request_of_the_largest_size() -> None:
    settings = load_settings({"workers": 8, "queue_size": 256, "key_max_requests": 3, "max_images_per_request": 64})
    own = worker_settings(settings, 7)
    assert (own.queue_size, own.key_max_requests) == (64, 1)
    assert worker_settings(load_settings({"workers": 2, "queue_size": 48}), 0).queue_size == 48


def child() -> Child:
    return Child("engine", lambda _: 0, STOP)


def reports(of: Child) -> list[Report]:
    return [report for report in of.link.receive() if report != Report()]


@on_a_loop
async def test_an_engine_reports_what_it_serves_and_ends_with_zero_when_it_is_told_to(tmp_path: Path) -> None:
    own, settings = child(), load_settings({"workers": 2})
    loaded: list[str] = []

    def load(settings: Any) -> Any:
        loaded.append(settings.checkpoint)
        return FakePredictor(), model_info()

    versions = {"": Version(3, "swapped")}
    running = asyncio.create_task(_run(settings, own, tmp_path / "engine", load, Metrics(), versions))
    found: list[Report] = []
    while not found:
        found = reports(own)
        await asyncio.sleep(0.001)
    assert (found, loaded) == ([Report(SERVING, versions)], ["swapped"])
    os.kill(os.getpid(), STOP)
    assert await running == 0


@on_a_loop
async def test_an_engine_that_cannot_go_on_in_its_process_asks_once_for_another(tmp_path: Path) -> None:
    def fail(_: Any) -> Any:
        raise NewProcessNeeded("no memory", "max_batch", 16)

    own, settings = child(), load_settings({"workers": 2})
    assert await _run(settings, own, tmp_path / "engine", fail, Metrics(), {}) == TRY_AGAIN
    assert reports(own) == [Report(options={"max_batch": 16})]
    own.options = {"max_batch": 16}
    assert await _run(settings, own, tmp_path / "engine", fail, Metrics(), {}) == 1


@on_a_loop
async def test_an_engine_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> Any:
        raise CheckpointError("no such folder")

    own = child()
    assert await _run(load_settings({"device": "cpu"}), own, tmp_path / "engine", fail, Metrics(), {}) == 1
    assert caplog.messages == ["cannot start: no such folder"]


def test_every_process_shows_what_all_have_counted_also_those_that_ended() -> None:
    script = """
import os, tempfile
from prometheus_client.multiprocess import mark_process_dead
from service.cluster.run import metrics_in
from service.observe.metrics import Metrics

folder = tempfile.mkdtemp()

def count(images, inflight):
    pid = os.fork()
    if pid == 0:
        own = metrics_in(folder)
        for _ in range(images):
            own.count_image("a")
        own.inflight.inc(inflight)
        os._exit(0)
    os.waitpid(pid, 0)
    return pid

count(3, 1)
mark_process_dead(count(4, 2), folder)
scraped = metrics_in(folder)
scraped.count_image("a")
lines = scraped.render().decode().splitlines()
print(sorted(line for line in lines if line.startswith(("vit_images_total", "vit_inflight"))))
"""
    assert run(script) == "['vit_images_total{model=\"a\"} 8.0', 'vit_inflight_requests 1.0']"


def test_a_folder_for_sockets_must_be_there_and_have_a_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.cluster.run.OperatingSystem", lambda: None)
    for folder, message in ((tmp_path / "none", "TMPDIR"), (tmp_path / (90 * "x"), "expected a shorter path")):
        if "x" in folder.name:
            folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with pytest.raises(SettingsError, match=message):
            Cluster(load_settings({"port": 0, "workers": 2}), lambda _: None)  # type: ignore[arg-type, return-value]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
