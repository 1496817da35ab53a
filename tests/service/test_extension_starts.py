"""A faulty extension ends a new process of the service with one line."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from model.extension import GROUP
from tests.conftest import REPOSITORY

BLOCKED = """
import asyncio, contextlib, sys, time
from service.extension import Extension
from service.web import app
from tests.service.web import apps

@contextlib.asynccontextmanager
async def beside(_):
    time.sleep(60)
    yield

async def start(running):
    async with running.lifespan(running):
        pass

app.BESIDE_SECONDS = 0.1
app.extensions = lambda: (Extension(name="a", beside=beside),)
asyncio.run(start(apps.inside(apps.app())))
"""


def test_blocked_event_loop_ends_the_start():
    done = start("-c", BLOCKED)

    assert done.returncode == 1
    assert done.stderr.startswith("the extension 'a': `beside` has not started within")


PREPARED = """
from contextlib import contextmanager
from service.extension import Extension

@contextmanager
def prepared(settings):
    yield {settings}
    print("ended", flush=True)
    raise KeyError("boom")

EXTENSION = Extension(name="a", prepared=prepared, serve=lambda *_: 3)
"""


def serve_with(folder: Path, settings: str) -> subprocess.CompletedProcess[str]:
    """Serve with an extension whose `prepared` yields these settings."""
    (folder / "faulty.py").write_text(PREPARED.format(settings=settings))
    with metadata(folder, f"[{GROUP}]\nfaulty = faulty:EXTENSION\n") as path:
        return start("-m", "service", "serve", "--workers", "2", "--port", "0", PYTHONPATH=path)


def test_end_of_prepared_is_reached(tmp_path):
    done = serve_with(tmp_path, "settings")

    assert done.returncode == 3
    assert "\nended\n" in done.stderr
    assert "the extension 'a': the end of `prepared` failed" in done.stderr


def test_prepared_must_return_settings(tmp_path):
    done = serve_with(tmp_path, "None")

    assert done.returncode == 1
    assert "vitserve: the extension 'a': `prepared` failed: TypeError: None is not" in done.stderr


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("faulty:EXTENSION", "faulty:EXTENSION cannot be loaded: RuntimeError: boom"),
        ("not valid!", "'not valid!' is not of the form module:name"),
    ],
    ids=["failing import", "no entry point"],
)
def test_command_line_refuses_in_one_line(tmp_path, entry, message):
    (tmp_path / "faulty.py").write_text("raise RuntimeError('boom')")
    with metadata(tmp_path, f"[{GROUP}]\nfaulty = {entry}\n") as path:
        done = start("-m", "service", "--help", PYTHONPATH=path)

    assert done.returncode == 1
    assert done.stderr.startswith(f"vitserve: the extension 'faulty' of faulty: {message}")
    assert done.stderr.count("\n") == 1


def test_broken_metadata_is_one_line(tmp_path):
    with metadata(tmp_path, f"[{GROUP}]\nno equals sign\n") as path:
        done = start("-m", "service", "--help", PYTHONPATH=path)

    assert done.returncode == 1
    assert done.stderr.startswith("vitserve: an installed package has an unreadable entry_points")
    assert done.stderr.count("\n") == 1


@contextmanager
def metadata(folder: Path, entry_points: str) -> Iterator[str]:
    """Write a package's metadata; yield the path that finds it."""
    written = folder / "faulty-0.dist-info"
    written.mkdir()
    (written / "METADATA").write_text("Name: faulty\nVersion: 0\n")
    (written / "entry_points.txt").write_text(entry_points)
    yield os.pathsep.join([str(folder), str(REPOSITORY)])


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
