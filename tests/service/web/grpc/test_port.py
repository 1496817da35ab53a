"""The port of gRPC."""

from __future__ import annotations

import socket

import pytest

from service.cli.serve import _check_address, grpc_port_kept
from service.settings import load_settings


def test_a_free_port_is_chosen_and_listeners_that_share_it_may_come() -> None:
    with grpc_port_kept(load_settings({"grpc_port": 0})) as settings:
        assert settings.grpc_port
        address = (settings.host, settings.grpc_port)
        with socket.create_server(address, reuse_port=True), socket.create_server(address, reuse_port=True):
            socket.create_connection(address, timeout=10).close()


def test_a_port_that_is_taken_ends_the_start_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            _check_address(load_settings({"port": 0, "grpc_port": port}))
    assert str(ended.value) == (
        f"vitserve: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "--grpc-port (VIT_GRPC_PORT) chooses another"
    )


def test_two_services_that_start_at_the_same_time_do_not_share_a_port() -> None:
    # Nobody listens on the port yet.
    with grpc_port_kept(load_settings({"grpc_port": 0})) as settings, pytest.raises(SystemExit, match="already in use"):
        _check_address(load_settings({"port": 0, "grpc_port": settings.grpc_port}))


def test_a_port_on_which_connections_have_just_ended_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller:
            before.accept()[0].close()
            assert caller.recv(1) == b""
    settings = load_settings({"port": 0, "grpc_port": port})
    _check_address(settings)
    with grpc_port_kept(settings) as kept:
        assert kept.grpc_port == port
