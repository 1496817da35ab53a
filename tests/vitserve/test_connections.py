"""Which connections a client shares: never those of another process or event loop."""

import asyncio
import json
import multiprocessing
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vitserve.client import AsyncClient, Client, Retries

ONCE = Retries(tries=1)


class PortOfCaller(BaseHTTPRequestHandler):
    """Answers with the port from which the caller's connection comes, as the only label."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        content = json.dumps({"model": "tiny", "labels": [str(self.client_address[1])]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), PortOfCaller)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_forked_process_gets_own_connections(url):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with Client(url, retries=ONCE) as client:
        before = client.labels()
        process = context.Process(target=lambda: sender.send(client.labels()))
        process.start()
        assert receiver.poll(30), "the forked process did not answer"
        in_child = receiver.recv()
        process.join()
        after = client.labels()

    assert after == before  # the connection was not disturbed
    assert in_child != before


def test_second_event_loop_gets_own_connections(url):
    client = AsyncClient(url, retries=ONCE)

    first = asyncio.run(client.labels())
    second = asyncio.run(client.labels())

    assert first != second


def test_one_event_loop_reuses_its_connection(url):
    async def ask_twice() -> list[list[str]]:
        async with AsyncClient(url, retries=ONCE) as client:
            return [await client.labels(), await client.labels()]

    first, second = asyncio.run(ask_twice())

    assert first == second
