"""The configuration of nginx, in a real nginx in front of two real servers."""

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
from contextlib import closing

import pytest

from tests.conftest import REPOSITORY
from tests.deploy.admin_routes import CONFIGURATION, admin_routes, configuration
from tests.e2e.checkpoints import write_checkpoint
from tests.e2e.serving import Served
from tests.launcher import free_port, listens, until
from tests.service.fakes import png

pytestmark = [
    pytest.mark.timeout(60),  # processes start
    pytest.mark.skipif(
        not all(map(shutil.which, ("nginx", "openssl"))), reason="nginx or openssl is not installed"
    ),
]
DOCUMENTED = CONFIGURATION.read_text()
NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    {documented}
    limit_req_zone $vitserve_caller zone=slow:1m rate=1r/m;
    server {{
        listen 127.0.0.1:{limited_port};
        set_real_ip_from 127.0.0.1;
        real_ip_header X-Real-IP;
        limit_req zone=slow;
        limit_req_status 429;
        location / {{ try_files /none =404; }}
    }}
}}
"""


class Proxy:
    """Run nginx with the documented configuration in front of two servers."""

    def __init__(self, port: int, limited_port: int, servers: tuple[Served, Served]) -> None:
        self.port = port
        self.limited_port = limited_port
        self.servers = servers

    def ask(
        self, method: str, path: str, body: bytes = b"", request_id: str = ""
    ) -> tuple[int, str, str]:
        """Return the status, media type and request id of an answer; nginx's answers lack an id."""
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=20, context=context
        )
        try:
            connection.request(
                method, path, body, {"X-Request-ID": request_id} if request_id else {}
            )
            answer = connection.getresponse()
            answer.read()
            return (
                answer.status,
                answer.headers["Content-Type"],
                answer.headers.get("X-Request-ID", ""),
            )
        finally:
            connection.close()

    def status_for(self, address: str) -> int:
        """Return the status for a client of an address that may send one request a minute."""
        connection = http.client.HTTPConnection("127.0.0.1", self.limited_port, timeout=20)
        with closing(connection):
            connection.request("GET", "/", headers={"X-Real-IP": address})
            return connection.getresponse().status


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("nginx")
    checkpoint = write_checkpoint(folder / "checkpoint", "tiny", (16, 16), tuple("ab"), seed=7)
    key = folder / "privkey.pem"
    certificate = folder / "fullchain.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
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
    first, second = (
        Served(folder / f"{n}.log", wait=False, warm=True, port=free_port(), **settings)
        for n in "12"
    )
    port = free_port()
    limited_port = free_port()
    try:
        until(lambda: all("ready: " in server.log for server in (first, second)))
        ports = [
            re.findall(r"ready: http://[\d.]+:(\d+)", server.log)[0] for server in (first, second)
        ]
        like = re.findall(r"server 127.0.0.1:8000([^;]*);", DOCUMENTED)[0]
        upstream = " ".join(f"server 127.0.0.1:{port}{like};" for port in ports)
        documented = (
            re.sub(r"server 127.0.0.1:8000[^;]*;", upstream, DOCUMENTED)
            .replace("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;")
            .replace("    listen [::]:443 ssl;\n", "")
            .replace("/etc/ssl/vit.example.org", str(folder))
            .replace("rate=20r/s", "rate=5000r/s")  # all clients of a test have the same address
            .replace("burst=40", "burst=5000")
        )
        file = folder / "nginx.conf"
        file.write_text(
            NGINX.format(folder=folder, documented=documented, limited_port=limited_port)
        )
        nginx = subprocess.Popen(["nginx", "-c", file, "-p", folder])
        try:
            proxy = Proxy(port, limited_port, (first, second))
            until(lambda: listens(port) or nginx.poll() is not None)
            yield proxy
        finally:
            nginx.terminate()
            nginx.wait()
    finally:
        first.kill()
        second.kill()


def test_the_proxy_passes_pictures_with_ids(proxy: Proxy) -> None:
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
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_spelling_opens_an_admin_path(proxy: Proxy, method: str, path: str) -> None:
    assert proxy.ask(method, path) == (404, "text/html", "")


def test_an_overloaded_proxy_adds_no_error(
    proxy: Proxy,
) -> None:
    picture = png(1, (64, 64))
    stop = threading.Event()

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


def test_no_admin_route_passes_the_proxy(proxy: Proxy) -> None:
    routes = [(method, path.replace("{}", "1")) for method, path in admin_routes()]
    assert ("DELETE", "/heads/1") in routes
    for method, path in routes:
        assert proxy.ask(method, path) == (404, "text/html", ""), (method, path)
        for written in (f"/{path}", f"/x/..{path}", path.replace("e", "%65")):
            assert proxy.ask(method, written) == (404, "text/html", ""), (method, written)
    for method, path in (("GET", "/models"), ("GET", "/heads/a"), ("PUT", "/heads/a/examples/1")):
        assert proxy.ask(method, path)[1] != "text/html", (method, path)


def test_limits_count_the_network_of_ipv6(proxy: Proxy) -> None:
    keys = set(re.findall(r"^limit_(?:req|conn)_zone (\S+) ", DOCUMENTED, re.MULTILINE))
    assert keys == {"$vitserve_caller"}
    addresses = [
        "2001:db8:a:a::1",
        "2001:db8:a:a:9:8:7:a0a",
        "2001:db8:a:b::1",
        "::ffff:192.0.2.1",
        "::ffff:192.0.2.2",
    ]
    assert [proxy.status_for(address) for address in [*addresses, "192.0.2.2"]] == [
        404,
        429,
        404,
        404,
        404,
        429,
    ]


def test_listed_admin_routes_are_current() -> None:
    assert CONFIGURATION.read_text() == configuration()


def test_caddys_file_closes_the_same_paths() -> None:
    page = (REPOSITORY / "docs/deployment.md").read_text()
    [caddy] = re.findall(r"^```caddyfile\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    closed = set(re.findall(r"respond (@\w+) 404", caddy))
    [of_any_method] = re.findall(r"(@\w+) path (.*)\n", caddy)
    by_method = re.findall(r"(@\w+) \{\n\s*method (.*)\n\s*path (.*)\n", caddy)
    matchers = [(of_any_method[0], "[A-Z]+", of_any_method[1]), *by_method]
    assert closed == {name for name, _, _ in matchers}
    ours = {
        (path.removesuffix("*"), frozenset(methods.split()))
        for _, methods, paths in matchers
        for path in paths.split()
    }
    lines = re.findall(r'^\s*"~\^(\S+) (/\S*?)\$?" 1;$', DOCUMENTED, re.MULTILINE)
    assert ours == {(path, frozenset(methods.strip("()").split("|"))) for methods, path in lines}
