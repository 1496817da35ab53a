"""An unread log loses only its lines: requests, health checks and the stop go on."""

import fcntl
import http.client
import os
import pty
import signal
import termios
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import client, together
from tests.launcher import PATIENCE, free_port, until
from tests.template import ForkedProcess

pytestmark = pytest.mark.timeout(180)  # servers start and end

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURE = REPOSITORY / "examples" / "dog.jpg"
MANY = 1_200
FEW = 500  # their lines already fill the pipe or the terminal
CALLERS = 8


@contextmanager
def unread_pipe() -> Iterator[int]:
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    yield write_end
    os.close(write_end)
    os.close(read_end)


@contextmanager
def stopped_terminal() -> Iterator[int]:
    """A terminal stopped with Ctrl-S."""
    controller, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    yield terminal
    os.close(terminal)
    os.close(controller)


@pytest.mark.parametrize(
    ("standard_error", "workers", "requests"),
    [
        (stopped_terminal, 1, MANY),
        (stopped_terminal, 2, FEW),
        (unread_pipe, 1, FEW),
        (unread_pipe, 2, MANY),
    ],
)
def test_nothing_waits_for_a_log_reader(
    standard_error: Callable[[], AbstractContextManager[int]], workers: int, requests: int
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {
        "VIT_PORT": str(port),
        "VIT_WORKERS": str(workers),
        "VIT_DRAIN_DELAY": "0",
        "VIT_CACHE_DIR": "off",
        "VIT_COMPILE": "off",
    }
    with standard_error() as descriptor:
        output = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        process = ForkedProcess(("serve",), {**os.environ, **settings}, output)
        try:
            with client(url) as caller:
                until(lambda: process.poll() is not None or is_ready(caller))
            answered = sum(together(CALLERS, lambda _: ask_many(url, requests // CALLERS)))
            assert answered == requests // CALLERS * CALLERS
            assert httpx.get(f"{url}/healthz", timeout=10).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)


def is_ready(caller: httpx.Client) -> bool:
    try:
        return caller.get("/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def ask_many(url: str, requests: int) -> int:
    """Send requests of one client, and return how many were answered with 200.

    `http.client` takes a quarter of httpx's time for as many requests.
    """
    answered = 0
    picture = PICTURE.read_bytes()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    for number in range(requests):
        if number % 50 == 0:
            connection.request("POST", "/classify", picture)
        else:
            connection.request("GET", "/labels")
        response = connection.getresponse()
        response.read()
        answered += response.status == 200
    connection.close()
    return answered
