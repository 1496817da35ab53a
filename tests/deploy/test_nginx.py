"""The file for nginx, by a real nginx in front of a small server that says what it was asked."""

from __future__ import annotations

import http.client
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.conftest import REPOSITORY
from tests.launcher import free_port

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
    """An nginx with the documented file; `asked` are the paths that came through, with the size of their bodies."""

    def __init__(self, port: int, asked: list[tuple[str, int]]) -> None:
        self.port, self.asked = port, asked

    def ask(self, method: str, path: str, body: bytes = b"") -> int:
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=context)
        try:
            connection.request(method, path, body)
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder, asked = tmp_path_factory.mktemp("nginx"), list[tuple[str, int]]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked.append((self.path, len(self.rfile.read(int(self.headers.get("Content-Length", 0))))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *arguments: object) -> None:
            pass

    key, certificate = folder / "privkey.pem", folder / "fullchain.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-subj", "/CN=vit.example.org", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *named], check=True, capture_output=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as behind:
        thread = threading.Thread(target=behind.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        port = free_port()
        documented = (
            DOCUMENTED.replace("server 127.0.0.1:8000;", f"server 127.0.0.1:{behind.server_port};")
            .replace("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;")
            .replace("/etc/ssl/vit.example.org", str(folder))
        )
        file = folder / "nginx.conf"
        file.write_text(NGINX.format(folder=folder, documented=documented))
        nginx = subprocess.Popen(["nginx", "-c", file, "-p", folder])
        try:
            proxy = Proxy(port, asked)
            wait_until_it_listens(proxy, nginx)
            asked.clear()
            yield proxy
        finally:
            nginx.terminate()
            nginx.wait()
            behind.shutdown()
            thread.join()


def wait_until_it_listens(proxy: Proxy, nginx: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while nginx.poll() is None and time.monotonic() < deadline:
        try:
            proxy.ask("GET", "/")
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return
    pytest.fail("nginx does not listen")


def test_requests_pass_with_a_photograph_as_their_body(proxy: Proxy) -> None:
    assert proxy.ask("POST", "/classify", bytes(5 << 20)) == 200
    assert proxy.ask("GET", "/v2/models/vit/ready") == 200
    assert proxy.asked[-2:] == [("/classify", 5 << 20), ("/v2/models/vit/ready", 0)]


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
    before = list(proxy.asked)
    assert proxy.ask(method, path) == 404
    assert proxy.asked == before


def test_caddys_file_closes_the_same_paths() -> None:
    [caddy] = re.findall(
        r"^```caddyfile\n(.*?)^```", (REPOSITORY / "docs/deployment.md").read_text(), re.MULTILINE | re.DOTALL
    )
    closed = re.findall(r"location (?:= )?(\S+) \{ return 404; \}", DOCUMENTED)
    [paths] = re.findall(r"@inside path (.*)\n\s*respond @inside 404", caddy)
    assert [path.removesuffix("*") for path in paths.split()] == closed
