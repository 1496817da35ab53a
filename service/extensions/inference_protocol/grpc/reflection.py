"""The service `grpc.reflection`: tells grpcurl and Postman the services of this port."""

import base64
from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from service.extensions.inference_protocol import GRPC_SERVICE
from service.extensions.inference_protocol.grpc import open_inference_pb2 as messages
from service.extensions.inference_protocol.grpc.standard import (
    FILES,
    REFLECTION_PACKAGES,
    message_class,
)

REQUEST: Final = message_class("grpc.reflection.v1.ServerReflectionRequest")
RESPONSE: Final = message_class("grpc.reflection.v1.ServerReflectionResponse")
PATHS: Final = tuple(
    f"/{package}.ServerReflection/ServerReflectionInfo" for package in REFLECTION_PACKAGES
)


# Methods of the protocol, and the name of the request message if it is not the method's own.
_METHODS: Final = {
    "ServerLive": None,
    "ServerReady": None,
    "ServerMetadata": None,
    "ModelReady": "ModelRequest",
    "ModelMetadata": "ModelRequest",
    "ModelConfig": "ModelRequest",
    "ModelStatistics": "ModelRequest",
    "ModelInfer": "ModelInferRequest",
}


def _files() -> dict[str, FileDescriptorProto]:
    protocol = FileDescriptorProto.FromString(messages.DESCRIPTOR.serialized_pb)
    package, _, name = GRPC_SERVICE.rpartition(".")
    service = FileDescriptorProto(
        name="inference.proto", package=package, syntax="proto3", dependency=[protocol.name]
    )
    described = service.service.add(name=name)
    for method, message in _METHODS.items():
        if message is None:
            service.message_type.add(name=f"{method}Request")
            input_type = f".{package}.{method}Request"
        else:
            input_type = f".{protocol.package}.{message}"
        output_type = f".{protocol.package}.{method}Response"
        described.method.add(name=method, input_type=input_type, output_type=output_type)
    return {protocol.name: protocol, service.name: service, **FILES}


def _symbols(file: FileDescriptorProto) -> set[str]:
    """Return the full names of a file's services, methods and messages."""
    names = [message.name for message in file.message_type]
    names += [service.name for service in file.service]
    names += [
        f"{service.name}.{method.name}" for service in file.service for method in service.method
    ]
    names += [
        f"{message.name}.{nested.name}"
        for message in file.message_type
        for nested in message.nested_type
    ]
    return {f"{file.package}.{name}" for name in names}


_FILES: Final = _files()
_BY_SYMBOL: Final = {symbol: file for file in _FILES.values() for symbol in _symbols(file)}
_SERVICES: Final = sorted(
    f"{file.package}.{service.name}" for file in _FILES.values() for service in file.service
)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request, both as dictionaries of `json_format`."""
    file: FileDescriptorProto | None = None
    if "list_services" in request:
        return _reply(
            request, "list_services_response", {"service": [{"name": name} for name in _SERVICES]}
        )
    if "file_by_filename" in request:
        file = _FILES.get(request["file_by_filename"])
    elif "file_containing_symbol" in request:
        file = _BY_SYMBOL.get(request["file_containing_symbol"])
    elif "all_extension_numbers_of_type" in request:
        name = request["all_extension_numbers_of_type"]
        if name in _BY_SYMBOL:
            return _reply(request, "all_extension_numbers_response", {"base_type_name": name})
    if file is None:
        code, reason = grpc.StatusCode.NOT_FOUND.value
        return _reply(request, "error_response", {"error_code": code, "error_message": reason})
    files = [file, *(_FILES[name] for name in file.dependency)]
    return _reply(
        request, "file_descriptor_response", {"file_descriptor_proto": list(map(_encoded, files))}
    )


def _encoded(file: FileDescriptorProto) -> str:
    """Return a file in the encoding of `json_format` for bytes."""
    return base64.b64encode(file.SerializeToString()).decode()


def _reply(request: Mapping[str, Any], name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "valid_host": request.get("host", ""),
        "original_request": dict(request),
        name: dict(content),
    }
