"""A collector of OpenTelemetry that receives spans by OTLP over HTTP, as protobuf."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from tests.stub_server import Asked, answering


@dataclass(frozen=True)
class Received:
    """A span with its process's attributes."""

    name: str
    process: dict[str, Any]
    attributes: dict[str, Any]
    message: Any

    @property
    def id(self) -> tuple[str, str]:
        """Return the ids of the trace and of the span."""
        return self.message.trace_id.hex(), self.message.span_id.hex()

    @property
    def parent(self) -> str:
        parent: str = self.message.parent_span_id.hex()
        return parent


class Collector:
    """The received spans."""

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
    """Run a collector."""
    collector = Collector()

    def answer(asked: Asked) -> tuple[int, dict[str, str], bytes]:
        assert asked.headers["content-type"] == "application/x-protobuf"
        body = gzip.decompress(asked.body) if asked.headers.get("content-encoding") else asked.body
        collector.receive(asked.path, body)
        return 200, {}, b""

    with answering(answer) as collector.url:
        yield collector
