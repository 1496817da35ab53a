"""Fixtures that every test folder may use."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests import launcher

# Before torch loads: threads that spin between operators stall the server processes that tests start beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real checkpoints and pictures: VIT_SHARED, or `../shared` beside the repository."""
    folder = Path(os.environ.get("VIT_SHARED", REPOSITORY.parent / "shared")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} does not exist (set VIT_SHARED)")
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of the `vitserve` processes that a failed test used."""
    report = yield
    if report.failed:
        report.sections += [(f"log of {command}", log) for command, log in launcher.recent_logs()]
    if call.when == "teardown":
        launcher.forget_ended()
    return report
