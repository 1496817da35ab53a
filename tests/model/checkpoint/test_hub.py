"""Hub ids, through the real huggingface_hub client against a local server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint import hub as hub_module
from model.checkpoint import load_checkpoint, native
from model.checkpoint.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.network.vit import VisionTransformer
from tests.model.checkpoint.folders import huggingface_folder

http = pytest.importorskip("huggingface_hub.utils._http", reason="the extra 'hub' is not installed")
constants = pytest.importorskip("huggingface_hub.constants", reason="the extra 'hub' is not installed")

MAIN = "a" * 40
OLD = "b" * 40

SCRIPT = """
import json, sys
from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
try:
    c = load_checkpoint(sys.argv[1])
    c.build()
    print(json.dumps({"name": c.name, "labels": c.labels, "revision": c.revision, "format": c.format}))
except CheckpointError as error:
    print(json.dumps({"error": str(error)}))
"""
"""For a process of its own: the client reads its settings from the environment when it is imported."""


def write_native(folder: Path, labels: tuple[str, ...]) -> None:
    config = ViTConfig(
        image_size=(16, 16), patch_size=8, width=16, depth=1, heads=2, mlp_width=32, num_classes=len(labels)
    )
    model = VisionTransformer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    preprocess = PreprocessConfig(
        size=(16, 16),
        resize="squash",
        resize_size=(16, 16),
        interpolation="bilinear",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
    checkpoint = Checkpoint("tiny", "here", "vitserve", "tiny", config, preprocess, labels, model.state_dict())
    native.write(folder, checkpoint)


@dataclass
class Hub:
    """Repositories by name and commit, and what was asked for."""

    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=lambda: {"main": MAIN, "v1": OLD})
    gated: set[str] = field(default_factory=set)
    token: str | None = None
    broken: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    endpoint: str = ""


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def refuse(self, status: int, code: str, message: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:  # noqa: PLR0911 - one answer a case
            authorization = self.headers.get("Authorization")
            hub.requests.append((self.command, self.path, authorization))
            parts = self.path.strip("/").split("/")
            # owner/name/resolve/revision/file
            if len(parts) < 5 or parts[2] != "resolve":
                return self.refuse(404, "EntryNotFound", "no such page")
            repository, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
            if repository not in hub.repositories:
                # The hub does not tell strangers which repositories exist.
                return self.refuse(401, "RepoNotFound", "Repository not found")
            if repository in hub.gated and authorization != f"Bearer {hub.token}":
                return self.refuse(401, "GatedRepo", "Access to this repository is restricted")
            if repository in hub.broken:
                return self.refuse(500, "ServerError", "internal error")
            commit = hub.branches.get(revision, revision)
            folder = hub.repositories[repository].get(commit)
            if folder is None:
                return self.refuse(404, "RevisionNotFound", "Revision not found")
            file = folder / name
            if not file.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("X-Repo-Commit", commit)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
            data = file.read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)
            return None

    return Handler


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


def load_in_process(source: str, home: Path, **environment: str) -> dict[str, Any]:
    """What a new process with this environment reads."""
    repository = Path(__file__).resolve().parents[3]
    env = {
        "PYTHONPATH": str(repository),
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, source],
        env=env | environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "\n" not in answer.get("error", "")
    return answer


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Reads an id in this process, as the client would in one with these settings from its start."""

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
        return {"labels": list(checkpoint.labels), "revision": checkpoint.revision}

    return load


Load = Callable[..., dict[str, Any]]


def test_the_clients_own_environment_variables_apply(hub: Hub, tmp_path: Path) -> None:
    hub.gated.add("owner/name")
    hub.token = "hf_secret"
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_secret"}
    assert load_in_process("owner/name", tmp_path, **settings)["labels"] == ["new", "other"]
    assert list((tmp_path / "hf" / "hub").glob("models--owner--name"))
    hub.requests.clear()
    offline = load_in_process("owner/name", tmp_path, **settings, HF_HUB_OFFLINE="1")
    assert offline["labels"] == ["new", "other"]
    assert hub.requests == []


def test_a_hub_id_is_read_at_its_main_branch_and_says_which_commit(hub: Hub, load: Load) -> None:
    answer = load("owner/name", hub)
    assert answer["labels"] == ["new", "other"]
    assert answer["revision"] == MAIN


@pytest.mark.parametrize("revision", ["v1", OLD])
def test_a_revision_is_pinned(hub: Hub, load: Load, revision: str) -> None:
    answer = load(f"owner/name@{revision}", hub)
    assert answer["labels"] == ["old", "other"]
    assert answer["revision"] == OLD


def test_all_files_are_of_the_commit_of_the_first(hub: Hub, load: Load) -> None:
    load("owner/name", hub)
    later = [path for _, path, _ in hub.requests if "model.safetensors" in path]
    assert later
    assert all(f"/resolve/{MAIN}/" in path for path in later)


def test_offline_mode_reads_the_cache_and_asks_nobody(hub: Hub, load: Load) -> None:
    load("owner/name", hub)
    hub.requests.clear()
    answer = load("owner/name", hub, offline=True)
    assert answer["labels"] == ["new", "other"]
    assert hub.requests == []


def test_what_is_cached_is_read_without_a_network(hub: Hub, load: Load) -> None:
    load("owner/name", hub)
    assert load("owner/name", None)["labels"] == ["new", "other"]


def test_offline_and_not_cached_is_said(hub: Hub, load: Load) -> None:
    assert "offline mode" in load("owner/name", hub, offline=True)["error"]


def test_no_network_is_said(load: Load) -> None:
    error = load("owner/name", None)["error"]
    assert "owner/name" in error
    assert "cannot be reached" in error


def test_without_a_network_the_client_neither_retries_nor_writes(
    load: Load, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    client = logging.getLogger("huggingface_hub")  # it does not propagate to the root
    client.addHandler(caplog.handler)
    request.addfinalizer(lambda: client.removeHandler(caplog.handler))
    waits: list[float] = []
    error = load("owner/name", None, wait=waits.append)["error"]
    assert error.startswith("owner/name: no such folder here")
    assert waits == []
    assert caplog.messages == []


def test_a_name_whose_resolution_hangs_is_not_waited_for(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def hang(*_: object) -> None:
        ended.wait()
        raise OSError("no network")

    monkeypatch.setattr(hub_module, "_CONNECT_TIMEOUT", 0.01)
    monkeypatch.setattr("socket.create_connection", hang)
    try:
        assert "cannot be reached: no connection in 0.01 s" in load("owner/name", None)["error"]
    finally:
        ended.set()


def test_a_proxy_is_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    assert hub_module.unreachable("https://hub.invalid", 1.0) == ""


def test_a_cached_folder_of_transformers_is_read_without_a_network(hub: Hub, load: Load, tmp_path: Path) -> None:
    hub.repositories["owner/vit"] = {MAIN: huggingface_folder(tmp_path / "vit")}
    assert load("owner/vit", hub)["labels"] == ["a", "b", "c"]
    assert load("owner/vit", None)["labels"] == ["a", "b", "c"]


def test_weights_that_are_not_cached_are_missed_by_saying_that_the_hub_is_not_reached(
    hub: Hub, load: Load, tmp_path: Path
) -> None:
    load("owner/name", hub)
    for weights in (tmp_path / "cache").rglob("model.safetensors"):
        weights.unlink()
    assert "(from the cache: the hub cannot be reached" in load("owner/name", None)["error"]


def test_a_mistyped_folder_is_not_looked_for_on_the_hub(hub: Hub, load: Load, tmp_path: Path) -> None:
    write_native(tmp_path / "models" / "my-vit", ("local", "other"))
    error = load("models/my-vti", hub)["error"]
    assert "no such folder or file; did you mean models/my-vit?" in error
    assert hub.requests == []
    write_native(tmp_path / "models" / "vit-base-patch16-224", ("local", "other"))
    assert "no such repository" in load("models/vit-base-patch16-384@main", hub)["error"]
    assert "no such repository" in load("models/resnet", hub)["error"]
    assert "did you mean" in load("./models/my-vti", hub)["error"]


def test_no_such_repository_is_said(hub: Hub, load: Load) -> None:
    assert "no such repository" in load("owner/nothing", hub)["error"]


def test_no_such_revision_is_said(hub: Hub, load: Load) -> None:
    assert "no revision 'v9'" in load("owner/name@v9", hub)["error"]


def test_a_gated_repository_is_said_and_opened_by_the_token(hub: Hub, load: Load) -> None:
    hub.gated.add("owner/name")
    hub.token = "hf_secret"
    error = load("owner/name", hub)["error"]
    assert "gated" in error
    assert "HF_TOKEN" in error
    answer = load("owner/name", hub, token="hf_secret")
    assert answer["labels"] == ["new", "other"]
    assert hub.requests[-1][2] == "Bearer hf_secret"


def test_a_failing_hub_is_said(hub: Hub, load: Load) -> None:
    hub.broken.add("owner/name")
    assert "500" in load("owner/name", hub)["error"]


def test_a_repository_that_is_no_vit_costs_no_weights(hub: Hub, load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    hub.repositories["owner/bert"] = {MAIN: folder}
    assert "BertModel" in load("owner/bert", hub)["error"]
    assert not any("safetensors" in path for _, path, _ in hub.requests)


def test_a_repository_without_a_config_is_said(hub: Hub, load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    hub.repositories["owner/empty"] = {MAIN: folder}
    assert load("owner/empty", hub)["error"] == "owner/empty: has no config.json"


def test_a_folder_of_that_name_wins_over_the_hub(hub: Hub, load: Load, tmp_path: Path) -> None:
    write_native(tmp_path / "owner" / "name", ("local", "other"))
    assert load("owner/name", hub)["labels"] == ["local", "other"]
    assert hub.requests == []


def test_without_the_client_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not here')\n")
    repository = Path(__file__).resolve().parents[3]
    answer = load_in_process("owner/name", tmp_path, PYTHONPATH=f"{tmp_path}:{repository}")
    assert "pip install 'vitserve[hub]'" in answer["error"]
