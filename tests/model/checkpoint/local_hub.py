"""A local server that speaks the hub's protocol, and a checkpoint to put there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import native
from model.checkpoint.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.network.vit import VisionTransformer

MAIN = "a" * 40
OLD = "b" * 40

Load = Callable[..., dict[str, Any]]
"""Reads an id through a hub or none; see the fixture `load`."""


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
