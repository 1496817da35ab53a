"""Clients behind a proxy of the environment: for which service, and messages of its failures."""

import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest

from tests.service.fakes import on_a_loop
from vitserve.client import AsyncClient, Client, ClientError, ForeignAnswer, Retries, Unreachable
from vitserve.proxies import proxy_of

URL = "http://127.0.0.1:8000"
ONCE = Retries(tries=1)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_dead_proxy_reveals_no_secret(
    variable: str, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, f"http://me:secret@127.0.0.1:{closed_port}")
    with Client(URL, retries=ONCE) as client, pytest.raises(Unreachable) as raised:
        client.labels()
    message = str(raised.value)
    assert f"the proxy http://127.0.0.1:{closed_port} ({variable})" in message
    assert message.endswith("; to connect without it, add 127.0.0.1 to NO_PROXY")
    assert "secret" not in message


@on_a_loop
async def test_async_clients_name_the_proxy(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{closed_port}")
    async with AsyncClient(URL, retries=ONCE) as client:
        with pytest.raises(Unreachable, match="NO_PROXY"):
            await client.labels()


def test_a_page_of_the_proxy_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.server_port}")
        with (
            Client("http://vit.internal", retries=ONCE) as client,
            pytest.raises(ForeignAnswer) as raised,
        ):
            client.labels()
        server.shutdown()
    assert f"the proxy http://127.0.0.1:{server.server_port}" in str(raised.value)
    assert "add vit.internal to NO_PROXY" in str(raised.value)


@pytest.mark.parametrize(
    ("proxy", "remedy"),
    [
        ("socks://127.0.0.1:7890", "expected http://"),
        ("socks5://127.0.0.1:7890", "pip install 'httpx[socks]'"),
        ("http://me:secret@127.0.0.1:abc", "expected http://HOST:PORT"),
    ],
)
def test_an_unusable_proxy_is_one_line(
    proxy: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ClientError) as raised:
        Client(URL)
    assert remedy in str(raised.value)
    assert "ALL_PROXY" in str(raised.value)
    assert "secret" not in str(raised.value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    Client(URL).close()


@pytest.mark.parametrize(
    ("url", "no_proxy", "is_exempt"),
    [
        (URL, "localhost, 127.0.0.1", True),
        (URL, "127.0.0.1:8000", True),
        (URL, "127.0.0.1:9000", False),
        (URL, "127.0.0.0/8", True),
        (URL, "*", True),
        (URL, "localhost", False),
        ("http://[::1]:8000", "[::1]", True),
        ("http://[::1]:8000", "::1", True),
        ("http://vit.example.org", "*.example.org", True),
        ("http://vit.example.org", ".example.org", True),
        ("http://vitexample.org", "example.org", False),
    ],
)
def test_no_proxy_exempts_a_service(
    url: str, no_proxy: str, is_exempt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_of(httpx.URL(url)) is None) == is_exempt
