"""Adapters on the hub and their bases."""

import shutil
from pathlib import Path

from tests.extensions.hub.local_hub import MAIN, Hub, Load
from tests.model.checkpoint.folders import adapter_folder, huggingface_folder


def test_cached_adapter_needs_no_network(hub: Hub, load: Load, tmp_path: Path) -> None:
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


def test_hub_adapters_name_no_local_base(hub: Hub, load: Load, tmp_path: Path) -> None:
    base = huggingface_folder(tmp_path / "base")
    hub.repositories["owner/adapter"] = {MAIN: adapter_folder(tmp_path / "adapter", str(base))}
    assert "is not a hub id, as its own is: set VIT_BASE" in load("owner/adapter", hub)["error"]
