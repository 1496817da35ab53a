"""Two services under load, and a Prometheus that scrapes them: what the picture shows where no other is named.

`two-workers` gets all of the load in phases, and one time each more than it admits and a killed engine.
`one-process` is asked a little, and shows what several processes do not: the memory of the process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import yaml

from benchmarks import pictures
from benchmarks.checkpoints import REPOSITORY
from benchmarks.reliability.http_caller import HttpCaller
from benchmarks.reliability.service_process import ServiceProcess
from benchmarks.reliability.traffic import Kind, Picture, Traffic, learn
from benchmarks.servers import free_port

_MIX: Final = {
    Kind.CLASSIFY: 0.72,
    Kind.WITH_MAP: 0.1,
    Kind.BATCH: 0.06,
    Kind.MAP: 0.06,
    Kind.BAD: 0.03,
    Kind.LEAVE: 0.03,
}
_SERVICES: Final = {
    "two-workers": {
        "VIT_WORKERS": "2",
        "VIT_MAX_BATCH": "16",
        "VIT_MAX_DELAY_MS": "8",
        "VIT_RECENT_BYTES": "2MiB",
    },
    "one-process": {},
}
_PHASES: Final = (8, 15, 25, 35, 25, 12, 20, 30, 20, 10)
"""Requests a second, one phase after the other."""
_CROWDED, _OTHER_PICTURES, _KILLED = 3, 5, 6
"""The phase after which more comes than is admitted, that with the first other pictures, that with a killed engine."""
_CROWD: Final = (400, 5)
"""Requests a second that are more than are admitted, and for how many seconds."""
_SETTINGS: Final = {"VIT_DRAIN_DELAY": "0", "OMP_NUM_THREADS": "1", "VIT_QUEUE_SIZE": "64"}


@contextmanager
def under_load(minutes: float) -> Iterator[str]:
    """Load the services for some minutes, and yield the URL of the Prometheus that watched them.

    Raises:
        FileNotFoundError: Prometheus is not installed.
        TimeoutError: a service was not ready within two minutes.
    """
    with tempfile.TemporaryDirectory(prefix="vitserve-dashboard-") as name, ExitStack() as stack:
        folder = Path(name)
        services = {}
        for instance, settings in _SERVICES.items():
            services[instance] = ServiceProcess(folder / f"{instance}.log", _SETTINGS | settings)
            stack.callback(services[instance].stop)
        for service in services.values():
            service.wait_until_ready()
        url = stack.enter_context(_prometheus(folder, services))
        asyncio.run(_load(services["two-workers"], services["one-process"], minutes * 60))
        yield url


async def _load(crowded: ServiceProcess, quiet: ServiceProcess, seconds: float) -> None:
    caller, other = (HttpCaller("127.0.0.1", service.port, patience=15) for service in (crowded, quiet))
    known = await learn(caller, [file.read_bytes() for file in pictures.ensure()[0]])
    surest = sorted(known, key=lambda picture: -max(picture.scores.values()))
    steady = asyncio.create_task(Traffic(other, known, seed=1, mix=_MIX).run(2, seconds))
    for number, rate in enumerate(_PHASES):
        shown: list[Picture] = surest[: len(surest) // 2] if number < _OTHER_PICTURES else surest[len(surest) // 2 :]
        await Traffic(caller, shown, seed=number, mix=_MIX).run(rate, seconds / len(_PHASES))
        if number == _CROWDED:
            await Traffic(caller, known, seed=number, mix={Kind.CLASSIFY: 1}).run(*_CROWD)
        if number == _KILLED:
            os.kill(crowded.engines()[0], signal.SIGKILL)
    await steady


@contextmanager
def _prometheus(folder: Path, services: dict[str, ServiceProcess]) -> Iterator[str]:
    targets = [
        {"targets": [f"127.0.0.1:{service.port}"], "labels": {"instance": instance}}
        for instance, service in services.items()
    ]
    # The intervals that deploy/prometheus ships.
    configuration = {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "rule_files": [str(REPOSITORY / "deploy/prometheus/rules/*.yml")],
        "scrape_configs": [{"job_name": "vitserve", "static_configs": targets}],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)
