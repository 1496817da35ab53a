"""Fixtures: a tiny checkpoint, pictures with known scores, and real server processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.checkpoints import write_checkpoint
from tests.e2e.serving import CHECKPOINT_NAME, LABELS, SIZE, Pictures, Serve, Served, predictor_of


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny checkpoint."""
    return write_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), CHECKPOINT_NAME, (SIZE, SIZE), LABELS, seed=7
    )


@pytest.fixture(scope="session")
def pictures(checkpoint: Path) -> Pictures:
    """Return noisy pictures of many sizes, each with the scores of the model alone."""
    return Pictures.make(predictor_of(checkpoint), count=64)


def _serve(folder: Path, checkpoint: Path) -> Iterator[Serve]:
    started: list[Served] = []

    def serve(**settings: object) -> Served:
        # Most tests do not depend on the backend, and a graph takes longer to compile than the rest
        # of a start.
        defaults: dict[str, Any] = {
            "checkpoint": checkpoint,
            "device": "cpu",
            "dtype": "float32",
            "compile": "off",
        }
        defaults |= {
            "request_timeout": 60
        }  # so that a busy machine does not refuse requests of the tests
        server = Served(
            folder / f"server-{len(started)}.log", **({"warm": True} | defaults | settings)
        )
        started.append(server)
        return server

    yield serve
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def serve_module(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Serve]:
    """Start servers that live until the end of a module's tests."""
    yield from _serve(tmp_path_factory.mktemp("servers"), checkpoint)


@pytest.fixture
def serve(tmp_path: Path, checkpoint: Path) -> Iterator[Serve]:
    """Start servers of one test; keywords are settings."""
    yield from _serve(tmp_path, checkpoint)
