"""A collector of OpenTelemetry: takes what is sent to it by OTLP over HTTP, as protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True)
class Received:
    """A span, with what its process says of itself."""

    name: str
    process: dict[str, Any]
    attributes: dict[str, Any]
    message: Any

    @property
    def id(self) -> tuple[str, str]:
        """The ids of its trace and of itself."""
        return self.message.trace_id.hex(), self.message.span_id.hex()

    @property
    def parent(self) -> str:
        parent: str = self.message.parent_span_id.hex()
        return parent


class Collector:
    """What was received so far."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.url = ""

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def receive(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        self.spans += _spans(ExportTraceServiceRequest.FromString(body))


def _spans(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for of_process in request.resource_spans:
        process = _values(of_process.resource.attributes)
        for scope in of_process.scope_spans:
            for span in scope.spans:
                yield Received(span.name, process, _values(span.attributes), span)


def _values(attributes: Any) -> dict[str, Any]:
    def value(attribute: KeyValue) -> Any:
        return getattr(attribute.value, str(attribute.value.WhichOneof("value")))

    return {attribute.key: value(attribute) for attribute in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.receive(self.path, gzip.decompress(body) if self.headers["Content-Encoding"] else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield collector
        server.shutdown()
