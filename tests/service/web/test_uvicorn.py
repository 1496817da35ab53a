"""What the service relies on inside uvicorn and httptools, by name: an upgrade that lacks it fails here."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.web.http_protocol import HttpProtocol
from service.web.server import Server
from tests.service.fakes import on_a_loop
from tests.service.web.wire import Wire

PROTOCOL_METHODS = {
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "on_header": ["name", "value"],
    "eof_received": [],
    "shutdown": [],
    "on_headers_complete": [],
    "on_body": ["body"],
    "on_message_complete": [],
    "pause_writing": [],
    "resume_writing": [],
    "send_400_response": ["msg"],
    "_start_asgi_task": ["cycle", "app"],
    "_unset_keepalive_if_required": [],
}
SERVER_METHODS = {"startup": ["sockets"], "shutdown": ["sockets"], "on_tick": ["counter"]}
PROTOCOL_ATTRIBUTES = {
    *("parser", "url", "headers", "cycle", "transport", "loop", "server_state", "pipeline", "expect_100_continue"),
    "connections",
}
CYCLE_ATTRIBUTES = {
    *("scope", "disconnected", "keep_alive", "more_body", "message_event", "response_started", "response_complete"),
    *("chunked_encoding", "expected_content_length"),
}
PARSER_METHODS = {"feed_data", "get_method", "get_http_version", "should_upgrade"}
OVERRIDDEN = {HttpProtocol: HttpToolsProtocol, Server: uvicorn.Server}


def missing(owner: object, names: set[str]) -> str:
    absent = sorted(name for name in names if not hasattr(owner, name))
    versions = f"uvicorn {uvicorn.__version__}, httptools {httptools.__version__}"
    return f"{versions}: {owner!r} no longer has {', '.join(absent)}" if absent else ""


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        *((HttpToolsProtocol, *method) for method in PROTOCOL_METHODS.items()),
        *((uvicorn.Server, *method) for method in SERVER_METHODS.items()),
    ],
)
def test_uvicorn_has_the_methods_that_are_overridden_or_called(owner: type, name: str, parameters: list[str]) -> None:
    assert not missing(owner, {name})
    method: Callable[..., object] = getattr(owner, name)
    found = list(inspect.signature(method).parameters)[1:]
    assert found == parameters, f"uvicorn {uvicorn.__version__}: {name} takes {found}, and not {parameters}"


def test_uvicorn_itself_starts_each_request_where_the_service_overrides_it() -> None:
    for caller in (HttpToolsProtocol.on_headers_complete, HttpToolsProtocol.on_response_complete):
        assert "_start_asgi_task" in caller.__code__.co_names, f"uvicorn {uvicorn.__version__}: {caller} is by-passed"


@on_a_loop
async def test_a_connection_has_the_attributes_that_are_read_and_set() -> None:
    async with Wire() as wire:
        await wire.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        cycle = wire.protocol.cycle
        assert isinstance(cycle, RequestResponseCycle)
        assert not missing(wire.protocol, PROTOCOL_ATTRIBUTES)
        assert not missing(cycle, CYCLE_ATTRIBUTES)
        assert not missing(wire.protocol.parser, PARSER_METHODS)


def test_the_modules_and_the_server_have_what_is_used_of_them() -> None:
    assert not missing(httptools_impl, {"STATUS_LINE"})
    assert not missing(httptools, {"HttpRequestParser", "HttpParserError", "HttpParserUpgrade"})
    assert not missing(ServerState(), {"default_headers"})
    assert not missing(uvicorn.Server(uvicorn.Config(lambda: None)), {"capture_signals", "started", "should_exit"})
    assert "self.servers" in inspect.getsource(uvicorn.Server), "uvicorn.Server no longer keeps its listeners"


@pytest.mark.parametrize("kind", OVERRIDDEN, ids=lambda kind: kind.__name__)
def test_every_private_override_is_listed_above(kind: type) -> None:
    base = OVERRIDDEN[kind]
    private = {
        name for name in vars(kind) if name.startswith("_") and not name.startswith("__") and hasattr(base, name)
    }
    assert private <= PROTOCOL_METHODS.keys()
