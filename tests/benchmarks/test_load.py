"""What the load generators report, and what they send."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest

from benchmarks import openloop
from benchmarks.load import loader, parse_wrk, wrk_script
from benchmarks.servers import OURS, SERVERS

_OUTPUT = """Running 3s test @ http://127.0.0.1:8000
  Non-2xx or 3xx responses: 10
RESULT requests=610 us=3000000 status=10 connect=1 read=2 write=3 timeout=4 p50=5000 p90=9000 p99=12500 max=20000
"""


def test_wrk_counts_only_requests_answered_200():
    load = parse_wrk(_OUTPUT)

    assert load.rate == 200
    assert (load.p50, load.p90, load.p99, load.max) == (5, 9, 12.5, 20)
    assert (load.refused, load.broken) == (10, 10)


def test_wrk_without_a_result_is_an_error_that_shows_its_output():
    with pytest.raises(ValueError, match="unable to connect"):
        parse_wrk("unable to connect to 127.0.0.1:1 Connection refused\n")


def test_the_script_names_bodies_path_and_headers_as_lua_strings():
    script = wrk_script([Path('a "quoted" name')], OURS)

    assert r'{"a \"quoted\" name"}' in script
    assert '"POST", "/classify", {["Content-Type"] = "image/jpeg"}' in script
    assert "turn % #requests" in script


def test_each_picture_is_wrapped_once(tmp_path):
    for name in ("0.jpg", "1.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    triton = next(server for server in SERVERS if server.environment == "pytriton").protocol

    with loader(sorted(tmp_path.glob("*.jpg")), triton) as load:
        bodies = [body.read_bytes() for body in load._bodies]

    length = int(triton.headers["Inference-Header-Content-Length"])
    assert [body[length:] for body in bodies] == [b"\x05\0\0\x000.jpg", b"\x05\0\0\x001.jpg"]
    assert all(re.search(rb'"binary_data_size":9\b', body[:length]) for body in bodies)


def test_open_loop_counts_answers_refusals_and_closed_connections(tmp_path):
    body = tmp_path / "body"
    body.write_bytes(b"picture")
    seen = []

    async def serve(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            seen.append((head, await reader.readexactly(7)))
            if len(seen) % 3 == 0:
                break
            status = b"200 OK" if len(seen) % 3 == 1 else b"503 Service Unavailable"
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        plan = {"url": f"http://127.0.0.1:{port}", "path": "/x", "headers": {"A": "b"}, "bodies": [str(body)]}
        async with server:
            return await openloop.run(plan | {"rate": 200, "seconds": 0.3})

    load = asyncio.run(run())

    answered = round(load.rate * 0.3)
    assert len(seen) == answered + load.refused + load.broken
    assert answered >= load.refused >= load.broken >= 1
    assert all(head.startswith(b"POST /x HTTP/1.1\r\n") and b"\r\nA: b\r\n" in head for head, _ in seen)
    assert load.p50 <= load.p90 <= load.p99 <= load.max


def test_open_loop_without_a_server_breaks_every_request(tmp_path):
    body = tmp_path / "body"
    body.write_bytes(b"picture")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        plan = {"url": f"http://127.0.0.1:{port}", "path": "/", "headers": {}, "bodies": [str(body)]}
        load = asyncio.run(openloop.run(plan | {"rate": 100, "seconds": 0.1}))

    assert load.rate == 0
    assert load.broken >= 1
