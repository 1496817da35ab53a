"""The Open Inference Protocol, version 2: its tensors, its documents, and what becomes of an
inference request.

https://github.com/kserve/open-inference-protocol, with the extensions of Triton that `EXTENSIONS`
names.
"""

from typing import Final

EXTENSIONS: Final = ("binary_tensor_data", "classification", "model_configuration", "statistics")
"""https://github.com/triton-inference-server/server/tree/main/docs/protocol."""

REPOSITORY_EXTENSION: Final = "model_repository"
"""Named where the checkpoint can be swapped."""

VERSION: Final = "1"
"""The only version of a model."""

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
