"""The Open Inference Protocol, version 2, with the Triton extensions in `EXTENSIONS`.

https://github.com/kserve/open-inference-protocol
"""

from typing import Final

EXTENSIONS: Final = ("binary_tensor_data", "classification", "model_configuration", "statistics")
"""https://github.com/triton-inference-server/server/tree/main/docs/protocol."""

REPOSITORY_EXTENSION: Final = "model_repository"
"""Extension of a server that can swap its checkpoint."""

VERSION: Final = "1"
"""The only version of each model."""

GRPC_SERVICE: Final = "inference.GRPCInferenceService"
"""The service's name over gRPC."""

GRPC_HEALTH_SERVICE: Final = "grpc.health.v1.Health"
"""The standard service for health checks."""

GRPC_PROBES: Final = frozenset(
    {
        f"/{GRPC_SERVICE}/ServerLive",
        f"/{GRPC_SERVICE}/ServerReady",
        f"/{GRPC_HEALTH_SERVICE}/Check",
        f"/{GRPC_HEALTH_SERVICE}/Watch",
    }
)
"""Methods that machines poll; they need no key."""
