"""Every kind of process that serves returns freed memory from time to time."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import ModuleType
from unittest.mock import Mock

import pytest

from service.cluster import engine_process, worker
from service.cluster.shared_resources import SharedResources
from service.observe.metrics import Metrics
from service.settings import Settings, load_settings
from service.web import single_process


class Trimming(Exception):
    """Ends the start of a process where it begins to trim."""


def web(settings: Settings) -> None:
    shared = SharedResources(settings)
    try:
        worker.run_web(settings, shared, 0, Metrics())
    finally:
        shared.close()


STARTS: list[tuple[ModuleType, Callable[[Settings], object]]] = [
    (single_process, lambda settings: single_process.run_single_process(settings, Mock())),
    (engine_process, lambda settings: engine_process.run_engine(settings, Mock(), Mock(), Mock())),
    (worker, web),
]


@pytest.mark.parametrize(("module", "start"), STARTS, ids=["single process", "engine", "worker"])
def test_the_process_trims_its_heap(
    module: ModuleType, start: Callable[[Settings], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise Trimming

    monkeypatch.setattr(module, "trim_regularly", stop)
    monkeypatch.setattr(signal, "signal", Mock())
    with pytest.raises(Trimming):
        start(load_settings({"port": 0, "workers": 2}))
