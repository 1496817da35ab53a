"""Any bytes on a connection get an answer or a close, and the service goes on."""

import socket
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launcher import ServerProcess
from tests.service.fakes import png

pytestmark = pytest.mark.timeout(0)  # `make fuzz` takes its time

PICTURE = png(1)
REQUESTS = [
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"HEAD / HTTP/1.0\r\n\r\n",
    b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
    % (len(PICTURE), PICTURE),
    b"POST /classify HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n0\r\n\r\n",
    b"POST /classify HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
    b"Content-Length: 3\r\n\r\nabc",
    b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 13\r\n\r\n{"image": ""}',
    b"POST /classify/batch HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 66\r\n\r\n"
    b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc\r\n--b--\r\n',
]
LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
TOKENS = [
    b"\r\n",
    b"\n",
    b"\0",
    b"\x80",
    b":",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"HTTP/1.0",
    b"%",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(
        tmp_path_factory.mktemp("server") / "log", warm=True, device="cpu", compile="off"
    ) as process:
        yield process


@given(st.data(), st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=3))
def test_damaged_requests_are_answered(
    server: ServerProcess, draw: st.DataObject, requests: list[bytes]
) -> None:
    data = b"".join(requests)
    for _ in range(draw.draw(st.integers(0, 4))):
        place = draw.draw(st.integers(0, len(data)))
        more = draw.draw(st.sampled_from(TOKENS) | st.binary(max_size=8))
        data = data[:place] + more + data[place + draw.draw(st.integers(0, 4)) :]
    with socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30
    ) as connection:
        connection.sendall(data + LAST)
        connection.settimeout(
            0.05
        )  # a damaged request may announce further bytes, which never come
        received = b""
        try:
            while piece := connection.recv(1 << 16):
                received += piece
        except (ConnectionResetError, TimeoutError):
            pass
    assert not received or received.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500" not in received


def test_the_service_is_as_it_was(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/readyz").status_code == 200
