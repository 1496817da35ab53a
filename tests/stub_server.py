"""A small HTTP server with answers of a test."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Asked(NamedTuple):
    """A request; the names of its headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answers = Callable[[Asked], tuple[int, dict[str, str], bytes]]
"""A function that returns status, headers and body for a request."""


@contextmanager
def answering(answer: Answers) -> Iterator[str]:
    """Listen, and return the address, such as `http://127.0.0.1:4000`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            status, fields, content = answer(Asked(self.command, self.path, headers, body))
            self.send_response(status)
            for name, value in (fields | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: 0 if self.command == "HEAD" else None])

        do_HEAD = do_GET  # noqa: N815 - the library's names
        do_POST = do_HEAD  # noqa: N815 - the library's names

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
