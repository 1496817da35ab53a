"""A local server with the hub's protocol."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.stub_server import Asked, answering

Load = Callable[..., dict[str, Any]]
"""The type of the fixture `load`, which reads an id through a hub or without one."""

MAIN = "a" * 40
OLD = "b" * 40
_BRANCHES = {"main": MAIN, "v1": OLD}


@dataclass
class Hub:
    """Repositories by name and commit, names of gated repositories, and received requests."""

    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    endpoint: str = ""

    def answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for `owner/name/resolve/revision/file`."""
        if path.startswith("/api/models/"):
            return self._tree(path)
        repository, _, asked = path.strip("/").partition("/resolve/")
        revision, _, name = asked.partition("/")
        commits = self.repositories.get(repository, {})
        commit = _BRANCHES.get(revision, revision)
        refusals = {
            # The hub hides the existence of repositories from strangers.
            (401, "RepoNotFound"): not commits,
            (401, "GatedRepo"): repository in self.gated
            and authorization != f"Bearer {self.token}",
            (404, "RevisionNotFound"): commit not in commits,
            (404, "EntryNotFound"): not (commits.get(commit, Path("/nowhere")) / name).is_file(),
        }
        for (status, code), applies in refusals.items():
            if applies:
                return (
                    status,
                    {"X-Error-Code": code, "X-Error-Message": code, "X-Repo-Commit": commit},
                    b"",
                )
        data = (commits[commit] / name).read_bytes()
        return 200, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit}, data

    def _tree(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return the list of files for `/api/models/owner/name/tree/revision`."""
        repository, _, asked = path.removeprefix("/api/models/").partition("/tree/")
        revision = asked.partition("?")[0]
        folder = self.repositories[repository][_BRANCHES.get(revision, revision)]
        files = [file for file in folder.rglob("*") if file.is_file()]
        listed = [
            {
                "type": "file",
                "path": str(file.relative_to(folder)),
                "oid": "0",
                "size": file.stat().st_size,
            }
            for file in files
        ]
        return 200, {"Content-Type": "application/json"}, json.dumps(listed).encode()


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve a hub and set its endpoint."""

    def answer(asked: Asked) -> tuple[int, dict[str, str], bytes]:
        authorization = asked.headers.get("authorization")
        hub.requests.append((asked.method, asked.path, authorization))
        return hub.answer(asked.path, authorization)

    with answering(answer) as hub.endpoint:
        yield hub
