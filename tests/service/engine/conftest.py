"""Fixtures: an engine in this process, and an engine behind a socket."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest

from tests.service.fakes import HAS_CLUSTER, Rig
from tests.service.fakes import running as running_engine

Running = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture(params=[False, True][: 1 + HAS_CLUSTER], ids=["local", "remote"][: 1 + HAS_CLUSTER])
def running(request: pytest.FixtureRequest) -> Running:
    """Return a function that starts an engine, see `fakes.running`."""
    return partial(running_engine, remote=request.param)
