"""The proxies with the files that are to be put in front of the service, and the service behind them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import yaml

from benchmarks.servers import free_port
from tests.service.fakes import PATIENCE, on_a_loop, png
from tests.service.http.listening import GET, Listening, listening, post
from tests.service.web.apps import until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PATHS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
BURST, CONNECTIONS = 40, 32

nginx = pytest.param("nginx", marks=pytest.mark.skipif(shutil.which("nginx", path=PATHS) is None, reason="no nginx"))
envoy = pytest.param("envoy", marks=pytest.mark.skipif(shutil.which("envoy", path=PATHS) is None, reason="no envoy"))


def nginx_command(folder: Path, port: int, behind: int) -> list[str]:
    """Write the file into a whole configuration, without TLS."""
    conf = re.sub(r"\n *ssl_certificate.*", "", (DEPLOY / "nginx/vitserve.conf").read_text())
    conf = conf.replace("listen 443 ssl", f"listen 127.0.0.1:{port}").replace("127.0.0.1:8000", f"127.0.0.1:{behind}")
    places = [f"{name}_temp_path {folder};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    main = folder / "nginx.conf"
    main.write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {' '.join(places)}\n{conf}\n}}"
    )
    return ["nginx", "-p", str(folder), "-c", str(main)]


def envoy_command(folder: Path, port: int, behind: int) -> list[str]:
    """Write the file without TLS."""
    conf = yaml.safe_load((DEPLOY / "envoy/vitserve.yaml").read_text())
    [listener], [cluster] = conf["static_resources"]["listeners"], conf["static_resources"]["clusters"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    del listener["filter_chains"][0]["transport_socket"], conf["admin"]
    [endpoint] = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["address"]["socket_address"]["port_value"] = behind
    main = folder / "envoy.yaml"
    main.write_text(yaml.safe_dump(conf))
    return ["envoy", "-c", str(main), "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error"]


COMMANDS = {"nginx": nginx_command, "envoy": envoy_command}


@asynccontextmanager
async def shielded(name: str, folder: Path) -> AsyncIterator[tuple[Listening, Listening]]:
    """The service, and the same by way of a proxy."""
    port = free_port()
    async with listening() as server:
        command = COMMANDS[name](folder, port, server.port)
        program = shutil.which(command[0], path=PATHS)
        assert program is not None
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([program, *command[1:]], stderr=log)
        try:
            async with asyncio.timeout(PATIENCE):
                while not await is_open(port):
                    assert process.poll() is None, (folder / "log").read_text()
                    await asyncio.sleep(0.02)
            yield server, Listening(server.app, port, server.connections)
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)


async def is_open(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@on_a_loop
@pytest.mark.parametrize("proxy", [nginx, envoy])
async def test_pictures_pass_and_metrics_stay_inside(proxy: str, tmp_path: Path) -> None:
    async with shielded(proxy, tmp_path) as (_, outside):
        answer = await outside.ask(post(png(7)))
        assert answer.status == 200
        assert json.loads(answer.body)["predictions"][0]["index"] == 7
        assert (await outside.ask(GET.replace(b"/healthz", b"/metrics"))).status == 404


@on_a_loop
@pytest.mark.parametrize("proxy", [nginx])
async def test_one_caller_s_flood_stays_outside(proxy: str, tmp_path: Path) -> None:
    async with shielded(proxy, tmp_path) as (server, outside):
        statuses = Counter([(await outside.ask(GET)).status for _ in range(5 * BURST)])
        assert set(statuses) == {200, 429}
        assert server.app.metric("vit_requests_total", endpoint="/healthz", code="200") == statuses[200]


@on_a_loop
@pytest.mark.parametrize("proxy", [nginx, envoy])
async def test_callers_whose_bodies_crawl_hold_no_connection_of_the_service(proxy: str, tmp_path: Path) -> None:
    async with shielded(proxy, tmp_path) as (server, outside), AsyncExitStack() as stack:
        for _ in range(CONNECTIONS):
            crawler = await stack.enter_async_context(outside.connect())
            await crawler.send(post(bytes(100))[:-50])
        async with outside.connect() as last:
            await last.send(post(bytes(100)))
            # nginx lets one address have so many at once; Envoy has no such limit.
            assert (await last.answer()).status == {"nginx": 429, "envoy": 415}[proxy]
        assert len(server.connections.open) == {"nginx": 0, "envoy": 1}[proxy]


@on_a_loop
@pytest.mark.parametrize("proxy", [nginx, envoy])
async def test_the_metrics_and_the_swap_are_for_the_inside(proxy: str, tmp_path: Path) -> None:
    swap = ["/v2/repository/models/vit/load", "/v2//repository/index", "/v2/%72epository/index"]
    async with shielded(proxy, tmp_path) as (server, outside):
        for path in ["/metrics", "//metrics", *swap]:
            status = (await outside.ask(GET.replace(b"/healthz", path.encode()))).status
            assert status in (400, 404), path
        assert server.app.metric("vit_requests_total", endpoint="/metrics", code="200") == 0
        assert (await outside.ask(GET)).status == 200


@on_a_loop
@pytest.mark.parametrize("proxy", [nginx])
async def test_a_caller_that_hardly_reads_leaves_nothing_in_the_service(proxy: str, tmp_path: Path) -> None:
    bundle = "/docs/swagger-ui-bundle.js"
    async with shielded(proxy, tmp_path) as (server, outside), outside.connect() as slow:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await slow.send(GET.replace(b"/healthz", bundle.encode()))
        await until(lambda: server.app.metric("vit_requests_total", endpoint=bundle, code="200") == 1)
        await until(lambda: all(one.transport.get_write_buffer_size() == 0 for one in server.connections.open))
