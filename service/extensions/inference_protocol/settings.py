"""The settings of the Open Inference Protocol."""

import importlib.metadata
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo

from service.addresses import tcp_hosts
from service.setting_values import is_installed

_OLDEST_GRPCIO = [1, 81]
"""Older versions do not bound the memory of callers without a key."""


def _grpc_port(value: int, info: ValidationInfo) -> int:
    if value and value == info.data.get("port"):
        raise ValueError("expected a port other than VIT_PORT")
    if not tcp_hosts(info.data.get("host", "127.0.0.1").split(",")):
        raise ValueError(
            "gRPC needs a host besides the Unix socket, as in VIT_HOST=unix:/PATH,127.0.0.1"
        )
    version = importlib.metadata.version("grpcio").split(".") if is_installed("grpc") else []
    if [int(part) for part in version[:2]] < _OLDEST_GRPCIO:
        raise ValueError("it needs grpcio 1.81 or newer: pip install 'vitserve[grpc]'")
    return value


class InferenceProtocolSettings(BaseModel):
    """Fields that join `service.settings.Settings`."""

    grpc_port: Annotated[int, Field(ge=0, le=65535), AfterValidator(_grpc_port)] | None = Field(
        None,
        description="port of the Open Inference Protocol over gRPC, on the same host; 0 picks a "
        "free port. It needs the extra `grpc`. Default: no gRPC",
    )
