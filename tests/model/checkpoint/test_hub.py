"""Hub ids, through the real huggingface_hub client against a local server that speaks the hub's
protocol, or none.
"""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import hub as hub_module
from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.model.checkpoint.folders import adapter_folder, huggingface_folder, native_folder
from tests.model.checkpoint.local_hub import MAIN, OLD, Hub, running

constants = pytest.importorskip(
    "huggingface_hub.constants", reason="the extra 'hub' is not installed"
)

Load = Callable[..., dict[str, Any]]
"""Reads an id through a hub or none; see the fixture `load`."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    commits = {
        commit: native_folder(tmp_path / commit, (first, "b", "c"))
        for commit, first in ((MAIN, "new"), (OLD, "old"))
    }
    with running(Hub({"owner/name": commits})) as hub:
        yield hub


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Reads an id in this process, as the client would in one with these settings from its start."""

    def load(
        source: str, hub: Hub | None, *, offline: bool = False, token: str = ""
    ) -> dict[str, Any]:
        endpoint = hub.endpoint if hub else "http://127.0.0.1:9"
        settings = {
            "ENDPOINT": endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
            "HF_HUB_OFFLINE": offline,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setenv("HF_TOKEN", token)
        try:
            checkpoint = load_checkpoint(source)
        except CheckpointError as error:
            assert "\n" not in str(error)
            return {"error": str(error)}
        checkpoint.build()
        return {
            "label": checkpoint.labels[0],
            "revision": checkpoint.revision,
            "notes": checkpoint.notes,
        }

    return load


@pytest.mark.parametrize(
    ("revision", "label", "commit"),
    [("", "new", MAIN), ("@v1", "old", OLD), (f"@{OLD}", "old", OLD)],
)
def test_an_id_is_read_at_its_revision_and_says_which_commit(
    revision: str, label: str, commit: str, hub: Hub, load: Load
) -> None:
    answer = load(f"owner/name{revision}", hub)
    assert (answer["label"], answer["revision"]) == (label, commit)


def test_what_is_cached_is_read_offline_and_without_a_network(
    hub: Hub, load: Load, tmp_path: Path
) -> None:
    load("owner/name", hub)
    hub.requests.clear()
    assert load("owner/name", hub, offline=True)["label"] == "new"
    assert hub.requests == []
    assert load("owner/name", None)["revision"] == MAIN
    for weights in (tmp_path / "cache").rglob("model.safetensors"):
        weights.unlink()
    assert "(from the cache: the hub cannot be reached" in load("owner/name", None)["error"]


def test_a_hub_that_takes_connections_and_answers_nothing_is_not_waited_for(
    hub: Hub, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("owner/name", hub)
    monkeypatch.setattr(hub_module, "_ANSWER_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answer = load("owner/name", Hub(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"))
    assert answer["notes"][0].startswith("owner/name (from the cache: the hub cannot be reached: ")


def test_what_cannot_be_had_is_said(hub: Hub, load: Load) -> None:
    no_folder = "no folder owner/nothing here (write ./ before a folder's name); on the hub: "
    assert load("owner/nothing", hub)["error"].startswith(
        f"{no_folder}no such repository, or a private"
    )
    assert (
        "it is not in the cache and the hub cannot be reached" in load("owner/name", None)["error"]
    )
    assert "no revision 'v9'" in load("owner/name@v9", hub)["error"]
    hub.gated.add("owner/name")
    hub.token = "hf_secret"
    assert (
        "gated: accept its terms on its page, then set HF_TOKEN" in load("owner/name", hub)["error"]
    )
    assert load("owner/name", hub, token="hf_secret")["label"] == "new"
    assert hub.requests[-1][2] == "Bearer hf_secret"


def test_a_repository_that_is_no_vit_costs_no_weights(hub: Hub, load: Load, tmp_path: Path) -> None:
    hub.repositories["owner/bert"] = {MAIN: huggingface_folder(tmp_path / "bert")}
    (tmp_path / "bert" / "config.json").write_text(
        json.dumps({"architectures": ["BertModel"], "model_type": "bert"})
    )
    assert "BertModel" in load("owner/bert", hub)["error"]
    assert not any("safetensors" in path for _, path, _ in hub.requests)


def test_a_folder_of_that_name_wins_over_the_hub(hub: Hub, load: Load, tmp_path: Path) -> None:
    native_folder(tmp_path / "owner" / "name", ("local", "b", "c"))
    assert load("owner/name", hub)["label"] == "local"
    assert hub.requests == []


def test_an_adapter_and_its_base_on_the_hub_are_read_without_a_network_once_they_are_cached(
    hub: Hub, load: Load, tmp_path: Path
) -> None:
    hub.repositories["owner/base"] = {MAIN: huggingface_folder(tmp_path / "base")}
    hub.repositories["owner/adapter"] = {MAIN: adapter_folder(tmp_path / "adapter", "owner/base")}
    assert load("owner/adapter", hub)["label"] == "a"
    for offline in (load("owner/adapter", hub, offline=True), load("owner/adapter", None)):
        assert offline["label"] == "a"
        assert "owner/base (from the cache: " in offline["notes"][-1]
    shutil.rmtree(tmp_path / "cache" / "models--owner--base")
    assert (
        "it is not in the cache and offline mode"
        in load("owner/adapter", hub, offline=True)["error"]
    )


def test_an_adapter_on_the_hub_names_no_base_on_this_machine(
    hub: Hub, load: Load, tmp_path: Path
) -> None:
    base = huggingface_folder(tmp_path / "base")
    hub.repositories["owner/adapter"] = {MAIN: adapter_folder(tmp_path / "adapter", str(base))}
    assert "as its base, which is no hub id: set VIT_BASE" in load("owner/adapter", hub)["error"]


def test_a_model_in_a_subfolder_of_a_repository_is_read(
    hub: Hub, load: Load, tmp_path: Path
) -> None:
    huggingface_folder(tmp_path / MAIN / "nested")
    (tmp_path / MAIN / "config.json").unlink()
    assert "there is a model in nested: give owner/name:nested" in load("owner/name", hub)["error"]
    for source in ("owner/name:nested", "owner/name@main:nested"):
        answer = load(source, hub)
        assert (answer["label"], answer["revision"]) == ("a", MAIN)
    assert load("owner/name:nested", hub, offline=True)["label"] == "a"
    assert (
        "there is a model in nested: give owner/name:nested"
        in load("owner/name", hub, offline=True)["error"]
    )
    (tmp_path / MAIN / "modules.json").write_text('[{"path": "nested"}]')
    assert load("owner/name", hub)["label"] == "a"
