"""Hub ids: the real huggingface_hub client against a local server, or without one."""

import json
import socket
import sys
from pathlib import Path

import pytest

from model.extensions.hub import repository as hub_module
from tests.extensions.hub.local_hub import MAIN, OLD, Hub, Load
from tests.model.checkpoint.folders import huggingface_folder, native_folder


@pytest.mark.parametrize(
    ("revision", "label", "commit"),
    [("", "new", MAIN), ("@v1", "old", OLD), (f"@{OLD}", "old", OLD)],
)
def test_hub_id_is_read_at_its_revision(
    revision: str, label: str, commit: str, hub: Hub, load: Load
) -> None:
    answer = load(f"owner/name{revision}", hub)
    assert (answer["label"], answer["revision"]) == (label, commit)


def test_cached_files_need_no_network(hub: Hub, load: Load, tmp_path: Path) -> None:
    load("owner/name", hub)
    hub.requests.clear()
    assert load("owner/name", hub, offline=True)["label"] == "new"
    assert hub.requests == []
    assert load("owner/name", None)["revision"] == MAIN
    for weights in (tmp_path / "cache").rglob("model.safetensors"):
        weights.unlink()
    assert "(from the cache: the hub cannot be reached" in load("owner/name", None)["error"]


def test_silent_hub_is_not_waited_for(
    hub: Hub, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("owner/name", hub)
    monkeypatch.setattr(hub_module, "PROBE_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answer = load("owner/name", Hub(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"))
    assert answer["notes"][0].startswith("owner/name (from the cache: the hub cannot be reached: ")


@pytest.mark.parametrize(
    ("setting", "url", "reason"),
    [
        (
            "all_proxy",
            "socks5://me:secret@127.0.0.1:9",
            "socks5://127.0.0.1:9 (all_proxy): it needs the package socksio: pip install 'httpx[",
        ),
        ("HTTP_PROXY", "127.0.0.1:9", "http://127.0.0.1:9 (HTTP_PROXY): "),
    ],
)
def test_proxy_before_the_hub_is_named(
    setting: str, url: str, reason: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "socks" in url:
        monkeypatch.setitem(sys.modules, "socksio", None)
    utils = pytest.importorskip("huggingface_hub.utils")
    utils.close_session()
    monkeypatch.setenv(setting, url)
    message = load("owner/name", Hub(endpoint="http://hub.invalid"), no_proxy="")["error"]
    utils.close_session()
    assert f"the hub cannot be reached through the proxy {reason}" in message
    assert message.endswith("; to connect without it, add hub.invalid to NO_PROXY")
    assert "secret" not in message


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


def test_other_models_cost_no_weights(hub: Hub, load: Load, tmp_path: Path) -> None:
    hub.repositories["owner/bert"] = {MAIN: huggingface_folder(tmp_path / "bert")}
    (tmp_path / "bert" / "config.json").write_text(
        json.dumps({"architectures": ["BertModel"], "model_type": "bert"})
    )
    assert "BertModel" in load("owner/bert", hub)["error"]
    assert not any("safetensors" in path for _, path, _ in hub.requests)


def test_a_local_folder_wins_over_the_hub(hub: Hub, load: Load, tmp_path: Path) -> None:
    native_folder(tmp_path / "owner" / "name", ("local", "b", "c"))
    assert load("owner/name", hub)["label"] == "local"
    assert hub.requests == []


def test_subfolder_of_a_repository_is_read(hub: Hub, load: Load, tmp_path: Path) -> None:
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
