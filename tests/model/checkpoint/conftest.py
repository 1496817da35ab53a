"""What the tests of hub ids share: a running local hub, and a client that asks it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.model.checkpoint.local_hub import MAIN, OLD, Hub, handler, write_native


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    for commit, labels in ((MAIN, ("new", "other")), (OLD, ("old", "other"))):
        folder = tmp_path / commit
        write_native(folder, labels)
        hub.repositories.setdefault("owner/name", {})[commit] = folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Reads an id in this process, as the client would in one with these settings from its start."""
    http = pytest.importorskip("huggingface_hub.utils._http", reason="the extra 'hub' is not installed")
    constants = pytest.importorskip("huggingface_hub.constants", reason="the extra 'hub' is not installed")

    def load(
        source: str, hub: Hub | None, *, offline: bool = False, token: str | None = None, wait: Any = None
    ) -> dict[str, Any]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("NO_PROXY", "*")
        endpoint = hub.endpoint if hub else "http://127.0.0.1:9"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        # It waits between its attempts.
        monkeypatch.setattr(http.time, "sleep", wait or (lambda _: None))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        if token is None:
            monkeypatch.delenv("HF_TOKEN", raising=False)
        else:
            monkeypatch.setenv("HF_TOKEN", token)
        try:
            checkpoint = load_checkpoint(source)
        except CheckpointError as error:
            assert "\n" not in str(error)
            return {"error": str(error)}
        checkpoint.build()
        return {"labels": list(checkpoint.labels), "revision": checkpoint.revision, "notes": list(checkpoint.notes)}

    return load
