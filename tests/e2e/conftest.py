"""A tiny checkpoint, pictures with known scores, and real server processes to ask."""

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
    """Noise of many sizes, each picture with the scores that the model gives it alone."""
    return Pictures.make(predictor_of(checkpoint), count=64)


def _serve(folder: Path, checkpoint: Path) -> Iterator[Serve]:
    started: list[Served] = []

    def serve(**settings: object) -> Served:
        # Most tests are not of what computes, and a graph takes longer to compile than all else of
        # a start.
        defaults: dict[str, Any] = {
            "checkpoint": checkpoint,
            "device": "cpu",
            "dtype": "float32",
            "compile": "off",
        }
        defaults |= {
            "request_timeout": 60
        }  # so that a busy machine refuses nothing that a test wants answered
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
    """Starts servers that live as long as the module's tests."""
    yield from _serve(tmp_path_factory.mktemp("servers"), checkpoint)


@pytest.fixture
def serve(tmp_path: Path, checkpoint: Path) -> Iterator[Serve]:
    """Starts servers of one test; settings as keywords."""
    yield from _serve(tmp_path, checkpoint)
