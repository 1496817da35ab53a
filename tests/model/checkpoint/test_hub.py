"""Hub ids, through the real huggingface_hub client against a local server that speaks the hub's protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model.checkpoint.local_hub import MAIN, OLD, Hub, Load, write_native

pytestmark = pytest.mark.timeout(120)  # a process that loads a checkpoint starts

pytest.importorskip("huggingface_hub", reason="the extra 'hub' is not installed")


def test_a_hub_id_is_read_at_its_main_branch_and_says_which_commit(hub: Hub, load: Load) -> None:
    answer = load("owner/name", hub)
    assert answer["labels"] == ["new", "other"]
    assert answer["revision"] == MAIN


@pytest.mark.parametrize("revision", ["v1", OLD])
def test_a_revision_is_pinned(hub: Hub, load: Load, revision: str) -> None:
    answer = load(f"owner/name@{revision}", hub)
    assert answer["labels"] == ["old", "other"]
    assert answer["revision"] == OLD


def test_offline_mode_reads_the_cache_and_asks_nobody(hub: Hub, load: Load) -> None:
    load("owner/name", hub)
    hub.requests.clear()
    answer = load("owner/name", hub, offline=True)
    assert answer["labels"] == ["new", "other"]
    assert hub.requests == []


def test_what_is_cached_is_read_without_a_network(hub: Hub, load: Load) -> None:
    load("owner/name", hub)
    assert load("owner/name", None)["labels"] == ["new", "other"]


def test_no_network_is_said(load: Load) -> None:
    error = load("owner/name", None)["error"]
    assert "owner/name" in error
    assert "cannot be reached" in error


def test_no_such_repository_is_said(hub: Hub, load: Load) -> None:
    error = load("owner/nothing", hub)["error"]
    assert error.startswith(
        "no folder owner/nothing here (write ./ before a folder's name); on the hub: no such repository, or a private"
    )


def test_what_fails_after_the_config_was_found_is_not_said_of_a_folder(hub: Hub, load: Load, tmp_path: Path) -> None:
    load("owner/name", hub)
    for weights in (tmp_path / "cache").rglob("model.safetensors"):
        weights.unlink()
    hub.broken.add("owner/name")
    assert load("owner/name", hub)["error"].startswith("owner/name: on the hub: adapter_config.json ")


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


def test_a_repository_that_is_no_vit_costs_no_weights(hub: Hub, load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    hub.repositories["owner/bert"] = {MAIN: folder}
    assert "BertModel" in load("owner/bert", hub)["error"]
    assert not any("safetensors" in path for _, path, _ in hub.requests)


def test_a_folder_of_that_name_wins_over_the_hub(hub: Hub, load: Load, tmp_path: Path) -> None:
    write_native(tmp_path / "owner" / "name", ("local", "other"))
    assert load("owner/name", hub)["labels"] == ["local", "other"]
    assert hub.requests == []
