"""The setting of the gRPC port."""

import pytest

from service.errors import SettingsError
from service.settings import load_settings


def test_grpc_needs_a_host_beside_the_socket() -> None:
    with pytest.raises(SettingsError, match=r"VIT_GRPC_PORT=.*VIT_HOST=unix:/PATH,127\.0\.0\.1"):
        load_settings({"host": "unix:/run/a", "grpc_port": 9001})
    assert (
        load_settings({"host": "unix:/run/a,127.0.0.1", "grpc_port": 9001}).model_dump()[
            "grpc_port"
        ]
        == 9001
    )
