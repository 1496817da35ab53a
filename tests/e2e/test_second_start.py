"""A second server starts from the graphs that the first one kept: it holds no torch, and answers the same."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.serving import Pictures, Serve, Served
from tests.launcher import until

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed"),
    pytest.mark.timeout(180),
]


def holds_torch(server: Served) -> bool:
    return "libtorch" in Path(f"/proc/{server.process.process.pid}/maps").read_text()


def test_a_second_server_holds_no_torch_until_something_needs_it(
    serve: Serve, pictures: Pictures, tmp_path: Path
) -> None:
    files = pictures.files[:4]
    queries = ["top_k=5", "attention=relevance", "attention=true"]

    def answers(server: Served) -> list[object]:
        found: list[object] = []
        for query in queries:
            for file in files:
                answer = server.classify(file, query).raise_for_status().json()
                found.append((answer["predictions"], (answer.get("attention") or {}) | {"url": None}))
        return found

    def kept() -> int:
        return len(list((tmp_path / "cache" / "graphs").glob("[0-9a-f]*/manifest.json")))

    first = serve(warm=False, cache_dir=tmp_path / "cache")
    assert holds_torch(first)
    answers(first)  # which makes the graph of relevance
    until(lambda: kept() == 2)
    content = first.get("/model").json()["content"]

    second = serve(warm=False, cache_dir=tmp_path / "cache")
    expected = answers(second)
    until(lambda: answers(first) == expected)  # a graph of relevance computes once it has been compared with torch
    first.process.terminate()
    assert second.get("/model").json()["content"] == content
    assert second.get("/model").json()["backend"].startswith("openvino")
    assert not holds_torch(second)
    # While torch is loaded for one caller, others are answered.
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(second.client.post, "/attention?method=gae", content=files[0])
        while not slow.done():
            second.classify(files[1]).raise_for_status()
        slow.result().raise_for_status()
    assert holds_torch(second)
    assert answers(second) == expected


def test_nothing_is_kept_where_that_is_off(serve: Serve, pictures: Pictures, tmp_path: Path) -> None:
    server = serve(cache_dir="off")
    server.classify(pictures.files[0]).raise_for_status()
    assert not list(tmp_path.rglob("manifest.json"))
