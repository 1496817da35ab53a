"""Stop a service under the load of 64 clients: each gets the answers to its own requests.

The load lasts a second; `VIT_SOAK_SECONDS=60` makes it longer.
"""

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from model.checkpoint import load_checkpoint
from model.runtime.predictor import Predictor
from tests.e2e.serving import Pictures, client
from tests.launcher import ServerProcess

pytestmark = pytest.mark.timeout(240)  # servers, checkpoints and many pictures

SECONDS = float(os.environ.get("VIT_SOAK_SECONDS", "1"))
CALLERS = 64
PICTURES = 100
DRAIN_DELAY = 1


class Caller(threading.Thread):
    """A client that asks without a pause until the service is about to stop."""

    def __init__(self, number: int, url: str, pictures: Pictures) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.url = url
        self.pictures = pictures
        self.outcomes: Counter[str] = Counter()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with client(self.url) as own:
                while self.ask(own):
                    pass
        except (AssertionError, httpx.HTTPError, ValueError) as error:
            self.error = error

    def ask(self, own: httpx.Client) -> bool:
        index = (self.number * 7 + self.outcomes["answered"]) % len(self.pictures)
        try:
            response = own.post(
                "/classify?top_k=10",
                content=self.pictures.files[index],
                headers={"Content-Type": "image/png"},
            )
        except httpx.ConnectError:  # after its delay, the service accepts no connections
            self.outcomes["sent away"] += 1
            return False
        self.pictures.check(index, response.raise_for_status().json())
        self.outcomes["answered"] += 1
        return True


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_no_answer_is_lost_under_load(tmp_path: Path) -> None:
    predictor = Predictor(
        load_checkpoint("bundled"), device="cpu", compile_mode="off", dtype="float32", threads=1
    )
    pictures = Pictures.make(predictor, count=PICTURES, side=32)
    with ServerProcess(
        tmp_path / "log",
        warm=True,
        device="cpu",
        dtype="float32",
        drain_delay=DRAIN_DELAY,
        request_timeout=60,
    ) as server:
        callers = [Caller(number, server.url, pictures) for number in range(CALLERS)]
        for caller in callers:
            caller.start()
        end = time.monotonic() + SECONDS
        while not any(caller.error for caller in callers) and (
            time.monotonic() < end or not all(caller.outcomes["answered"] for caller in callers)
        ):
            time.sleep(0.1)
        metrics = server.metrics()
        images = metrics['vit_images_total{model="vit-cifar10"}']
        assert server.process.poll() is None

        server.process.send_signal(signal.SIGTERM)
        for caller in callers:
            caller.join(60)
        assert [caller.error for caller in callers if caller.error] == []
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log

    outcomes = sum((caller.outcomes for caller in callers), Counter())
    assert outcomes["sent away"] == CALLERS
    assert outcomes["answered"] >= images >= CALLERS
    assert metrics["vit_cancelled_total"] == 0
