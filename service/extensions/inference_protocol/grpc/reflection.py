"""The service `grpc.reflection`: tells grpcurl and Postman the services of this port."""

import base64
from collections.abc import Mapping
from typing import Any, Final

import grpc

from service.extensions.inference_protocol.grpc.descriptors import FILES, POOL

REQUEST: Final = "grpc.reflection.v1.ServerReflectionRequest"
RESPONSE: Final = "grpc.reflection.v1.ServerReflectionResponse"

# Clients use the second package if the first is unknown; the messages are the same.
PATHS: Final = tuple(
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    for version in ("v1", "v1alpha")
)
_SERVICES: Final = sorted(
    f"{file.package}.{service.name}" for file in FILES for service in file.service
)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request, both as dictionaries of `json_format`."""
    try:
        content = _content(request)
    except KeyError:  # the pool lacks the name
        code, reason = grpc.StatusCode.NOT_FOUND.value
        content = {"error_response": {"error_code": code, "error_message": reason}}
    return {
        "valid_host": request.get("host", ""),
        "original_request": dict(request),
        **content,
    }


def _content(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field that answers a request; raises `KeyError` for an unknown name."""
    if "list_services" in request:
        return {"list_services_response": {"service": [{"name": name} for name in _SERVICES]}}
    if "all_extension_numbers_of_type" in request:
        name = request["all_extension_numbers_of_type"]
        POOL.FindMessageTypeByName(name)
        return {"all_extension_numbers_response": {"base_type_name": name}}
    if "file_by_filename" in request:
        file = POOL.FindFileByName(request["file_by_filename"])
    else:
        file = _file_with(request["file_containing_symbol"])
    described = [file.serialized_pb, *(needed.serialized_pb for needed in file.dependencies)]
    # `json_format` writes bytes as base64.
    contents = [base64.b64encode(content).decode() for content in described]
    return {"file_descriptor_response": {"file_descriptor_proto": contents}}


def _file_with(symbol: str) -> Any:
    """Return the file that declares a symbol; raises `KeyError`."""
    try:
        return POOL.FindFileContainingSymbol(symbol)
    except KeyError:  # it does not know methods
        return POOL.FindMethodByName(symbol).containing_service.file
