"""The file for nginx, by a real nginx in front of two real servers."""

import http.client
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.checkpoints import write_checkpoint
from tests.e2e.serving import Served
from tests.launcher import free_port, listens, until
from tests.service.fakes import png

pytestmark = [
    pytest.mark.timeout(60),  # processes start
    pytest.mark.skipif(not all(map(shutil.which, ("nginx", "openssl"))), reason="nginx or openssl is not installed"),
]
DOCUMENTED = (REPOSITORY / "deploy/nginx/vitserve.conf").read_text()
NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
    uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    {documented}
}}
"""


class Proxy:
    """An nginx with the documented file, before two servers."""

    def __init__(self, port: int, servers: tuple[Served, Served]) -> None:
        self.port, self.servers = port, servers

    def ask(self, method: str, path: str, body: bytes = b"", request_id: str = "") -> tuple[int, str, str]:
        """The answer's status, the kind of its body, and the id of its request, empty where it is nginx's own."""
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=context)
        try:
            connection.request(method, path, body, {"X-Request-ID": request_id} if request_id else {})
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.headers["Content-Type"], answer.headers.get("X-Request-ID", "")
        finally:
            connection.close()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("nginx")
    checkpoint = write_checkpoint(folder / "checkpoint", "tiny", (16, 16), tuple("ab"), seed=7)
    key, certificate = folder / "privkey.pem", folder / "fullchain.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-subj", "/CN=vit.example.org", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *named], check=True, capture_output=True)
    settings = {
        "checkpoint": checkpoint,
        "device": "cpu",
        "compile": "off",
        "queue_size": 1,
        "drain_delay": 1,
        "log_format": "json",
    }
    first, second = (Served(folder / f"{n}.log", wait=False, warm=True, port=free_port(), **settings) for n in "12")
    port = free_port()
    try:
        until(lambda: all("ready: " in server.log for server in (first, second)))
        ports = [re.findall(r"ready: http://[\d.]+:(\d+)", server.log)[0] for server in (first, second)]
        like = re.findall(r"server 127.0.0.1:8000([^;]*);", DOCUMENTED)[0]
        upstream = " ".join(f"server 127.0.0.1:{port}{like};" for port in ports)
        documented = (
            re.sub(r"server 127.0.0.1:8000[^;]*;", upstream, DOCUMENTED)
            .replace("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;")
            .replace("/etc/ssl/vit.example.org", str(folder))
            .replace("rate=20r/s", "rate=5000r/s")  # all callers of a test have one address
            .replace("burst=40", "burst=5000")
        )
        file = folder / "nginx.conf"
        file.write_text(NGINX.format(folder=folder, documented=documented))
        nginx = subprocess.Popen(["nginx", "-c", file, "-p", folder])
        try:
            proxy = Proxy(port, (first, second))
            until(lambda: listens(port) or nginx.poll() is not None)
            yield proxy
        finally:
            nginx.terminate()
            nginx.wait()
    finally:
        first.kill()
        second.kill()


def test_requests_pass_with_a_photograph_as_their_body_and_the_callers_id(proxy: Proxy) -> None:
    too_many_pixels = proxy.ask("POST", "/classify", bytes(5 << 20), request_id="mine-1")
    assert too_many_pixels == (415, "application/problem+json", "mine-1")  # vitserve's answer
    status, _, request_id = proxy.ask("GET", "/v2/models/tiny/ready", request_id="a b")
    assert status == 200
    assert re.fullmatch("[0-9a-f]{32}", request_id)


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/metrics?a=b",
        "//metrics",
        "/%6detrics",
        "/v2/repository/models/vit/load",
        "/v2//repository/models/vit/load",
        "/v2/./repository/models/vit/unload",
        "/docs/../v2/repository/models/vit/load",
        "/v2/%72epository/models/vit/load",
        "/v2%2Frepository%2Fmodels%2Fvit%2Fload",
        "/v2/repository/index",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_for_the_inside_does_not_pass_however_it_is_written(proxy: Proxy, method: str, path: str) -> None:
    assert proxy.ask(method, path) == (404, "text/html", "")


def test_under_overload_and_while_a_server_stops_callers_see_answers_and_refusals_of_vitserve_alone(
    proxy: Proxy,
) -> None:
    picture, stop = png(1, (64, 64)), threading.Event()

    def call() -> Counter[tuple[int, str]]:
        seen: Counter[tuple[int, str]] = Counter()
        while not stop.is_set():
            status, kind, _ = proxy.ask("POST", "/classify", picture)
            seen[status, kind] += 1
        return seen

    with ThreadPoolExecutor(12) as pool:
        callers = [pool.submit(call) for _ in range(12)]
        time.sleep(1.5)
        ended = proxy.servers[0].process.terminate()
        time.sleep(1.0)
        stop.set()
        seen = sum((caller.result() for caller in callers), Counter[tuple[int, str]]())
    assert ended == 0
    assert seen.keys() == {(200, "application/json"), (503, "application/problem+json")}
    assert seen[200, "application/json"] > 50


def test_caddys_file_closes_the_same_paths() -> None:
    [caddy] = re.findall(
        r"^```caddyfile\n(.*?)^```", (REPOSITORY / "docs/deployment.md").read_text(), re.MULTILINE | re.DOTALL
    )
    closed = re.findall(r"location (?:= )?(\S+) \{ return 404; \}", DOCUMENTED)
    [paths] = re.findall(r"@inside path (.*)\n\s*respond @inside 404", caddy)
    assert [path.removesuffix("*") for path in paths.split()] == closed
