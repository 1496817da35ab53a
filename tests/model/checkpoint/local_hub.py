"""A local server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAIN = "a" * 40
OLD = "b" * 40
_BRANCHES = {"main": MAIN, "v1": OLD}


@dataclass
class Hub:
    """Repositories by name and commit, those that are gated, and what was asked for."""

    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    endpoint: str = ""

    def answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for `owner/name/resolve/revision/file`."""
        repository, _, asked = path.strip("/").partition("/resolve/")
        revision, _, name = asked.partition("/")
        commits = self.repositories.get(repository, {})
        commit = _BRANCHES.get(revision, revision)
        refusals = {
            # The hub does not tell strangers which repositories exist.
            (401, "RepoNotFound"): not commits,
            (401, "GatedRepo"): repository in self.gated and authorization != f"Bearer {self.token}",
            (404, "RevisionNotFound"): commit not in commits,
            (404, "EntryNotFound"): not (commits.get(commit, Path("/nowhere")) / name).is_file(),
        }
        for (status, code), applies in refusals.items():
            if applies:
                return status, {"X-Error-Code": code, "X-Error-Message": code, "X-Repo-Commit": commit}, b""
        data = (commits[commit] / name).read_bytes()
        return 200, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit}, data


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve a hub, which then knows its endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            authorization = self.headers.get("Authorization")
            hub.requests.append((self.command, self.path, authorization))
            status, headers, body = hub.answer(self.path, authorization)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the library's name

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()
