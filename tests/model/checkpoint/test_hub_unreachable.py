"""Hub ids without a network, and folders' names that only look like hub ids."""

from __future__ import annotations

import logging
import shutil
import socket
from pathlib import Path

import pytest

from model.checkpoint import hub as hub_module
from tests.model.checkpoint.folders import adapter_folder, huggingface_folder
from tests.model.checkpoint.local_hub import MAIN, Hub, Load


def test_without_a_network_the_client_neither_retries_nor_writes(
    load: Load, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    client = logging.getLogger("huggingface_hub")  # it does not propagate to the root
    client.addHandler(caplog.handler)
    request.addfinalizer(lambda: client.removeHandler(caplog.handler))
    waits: list[float] = []
    error = load("owner/name", None, wait=waits.append)["error"]
    assert error.startswith("no folder owner/name here (write ./ before a folder's name); on the hub: ")
    assert waits == []
    assert caplog.messages == []


def test_a_hub_that_takes_connections_and_answers_nothing_is_not_waited_for(
    hub: Hub, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("owner/name", hub)
    monkeypatch.setattr(hub_module, "_ANSWER_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = Hub(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        answer = load("owner/name", mute)
    assert answer["labels"] == ["new", "other"]
    assert answer["notes"][0].startswith("owner/name (from the cache: the hub cannot be reached: ")


def test_weights_that_are_not_cached_are_missed_by_saying_that_the_hub_is_not_reached(
    hub: Hub, load: Load, tmp_path: Path
) -> None:
    load("owner/name", hub)
    for weights in (tmp_path / "cache").rglob("model.safetensors"):
        weights.unlink()
    assert "(from the cache: the hub cannot be reached" in load("owner/name", None)["error"]


def test_an_adapter_and_its_base_on_the_hub_are_read_without_a_network_once_they_are_cached(
    hub: Hub, load: Load, tmp_path: Path
) -> None:
    hub.repositories["owner/base"] = {MAIN: huggingface_folder(tmp_path / "base")}
    hub.repositories["owner/adapter"] = {MAIN: adapter_folder(tmp_path / "adapter", "owner/base")}
    online = load("owner/adapter", hub)
    assert online["labels"] == ["a", "b", "c"]
    hub.requests.clear()
    for offline in (load("owner/adapter", hub, offline=True), load("owner/adapter", None)):
        assert offline["labels"] == ["a", "b", "c"]
        assert "owner/base (from the cache: " in offline["notes"][-1]
    assert hub.requests == []
    shutil.rmtree(tmp_path / "cache" / "models--owner--base")
    assert "it is not in the cache and offline mode" in load("owner/adapter", hub, offline=True)["error"]
    # As the client fetches a whole repository: without a note of what it does not have.
    shutil.rmtree(tmp_path / "cache" / "models--owner--adapter" / ".no_exist")
    assert "owner/base" in load("owner/adapter", hub, offline=True)["error"]


def test_an_adapter_on_the_hub_names_no_base_on_this_machine(hub: Hub, load: Load, tmp_path: Path) -> None:
    base = huggingface_folder(tmp_path / "base")
    hub.repositories["owner/adapter"] = {MAIN: adapter_folder(tmp_path / "adapter", str(base))}
    assert "as its base, which is no hub id: set VIT_BASE" in load("owner/adapter", hub)["error"]
