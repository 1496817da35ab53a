"""The library's limits are those of the settings, and ours where it has none."""

from __future__ import annotations

import pytest

from service.settings import load_settings
from service.web.grpc import server


@pytest.mark.parametrize(("files", "connections"), [(1000, 996), (5, 1), (4, 1)])
def test_every_limit_is_told_to_the_library(files: int, connections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def connection_limit(wanted: int) -> int:
        assert wanted == 8
        return files

    monkeypatch.setattr(server, "connection_limit", connection_limit)
    assert dict(server.server_options(load_settings({"max_connections": 4, "max_request_bytes": 5 << 20}))) == {
        "grpc.max_receive_message_length": 5 << 20,
        "grpc.compression_enabled_algorithms_bitset": 1,
        "grpc.max_concurrent_streams": 4,
        "grpc.max_allowed_incoming_connections": connections,
        "grpc.server_handshake_timeout_ms": 5_000,
        "grpc.max_connection_idle_ms": 300_000,
        "grpc.keepalive_time_ms": 30_000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": 10_000,
        "grpc.so_reuseport": 1,
    }
