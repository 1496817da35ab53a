"""Messages of the standard services `grpc.health.v1` and `grpc.reflection`, in their own pool.

The default descriptor pool accepts each name once, and other packages may register the same names.

https://github.com/grpc/grpc-proto/blob/master/grpc/health/v1/health.proto
https://github.com/grpc/grpc-proto/blob/master/grpc/reflection/v1/reflection.proto
"""

from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

REFLECTION_PACKAGES: Final = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
"""Clients use the second package if the first is unknown; the messages are the same."""

_HEALTH_FILE: Final = "grpc/health/v1/health.proto"


def _field(name: str, number: int, kind: str, **more: Any) -> dict[str, Any]:
    type_ = (
        {"type_name": kind, "type": "TYPE_MESSAGE"}
        if kind.startswith(".")
        else {"type": f"TYPE_{kind}"}
    )
    return {"name": name, "number": number, "label": "LABEL_OPTIONAL", **type_, **more}


def _method(name: str, input_type: str, output_type: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_type": input_type, "output_type": output_type, **more}


def _file(
    name: str, package: str, messages: dict[str, list[dict[str, Any]]], **more: Any
) -> FileDescriptorProto:
    described = [{"name": message, "field": fields} for message, fields in messages.items()]
    document = {
        "name": name,
        "package": package,
        "syntax": "proto3",
        "message_type": described,
        **more,
    }
    return json_format.ParseDict(document, FileDescriptorProto())


def _health() -> FileDescriptorProto:
    package = ".grpc.health.v1"
    request = f"{package}.HealthCheckRequest"
    response = f"{package}.HealthCheckResponse"
    file = _file(
        _HEALTH_FILE,
        "grpc.health.v1",
        {
            "HealthCheckRequest": [_field("service", 1, "STRING")],
            "HealthCheckResponse": [
                _field("status", 1, "ENUM", type_name=f"{response}.ServingStatus")
            ],
        },
        service=[
            {
                "name": "Health",
                "method": [
                    _method("Check", request, response),
                    _method("Watch", request, response, server_streaming=True),
                ],
            }
        ],
    )
    values = [
        {"name": name, "number": number}
        for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"))
    ]
    json_format.ParseDict(
        {"name": "ServingStatus", "value": values}, file.message_type[1].enum_type.add()
    )
    return file


def _reflection(package: str) -> FileDescriptorProto:
    prefix = f".{package}."
    request = "ServerReflectionRequest"
    response = "ServerReflectionResponse"
    file = _file(
        f"{package.replace('.', '/')}/reflection.proto",
        package,
        {
            request: [
                _field("host", 1, "STRING"),
                _field("file_by_filename", 3, "STRING", oneof_index=0),
                _field("file_containing_symbol", 4, "STRING", oneof_index=0),
                _field("file_containing_extension", 5, f"{prefix}ExtensionRequest", oneof_index=0),
                _field("all_extension_numbers_of_type", 6, "STRING", oneof_index=0),
                _field("list_services", 7, "STRING", oneof_index=0),
            ],
            "ExtensionRequest": [
                _field("containing_type", 1, "STRING"),
                _field("extension_number", 2, "INT32"),
            ],
            response: [
                _field("valid_host", 1, "STRING"),
                _field("original_request", 2, f"{prefix}{request}"),
                _field(
                    "file_descriptor_response", 4, f"{prefix}FileDescriptorResponse", oneof_index=0
                ),
                _field(
                    "all_extension_numbers_response",
                    5,
                    f"{prefix}ExtensionNumberResponse",
                    oneof_index=0,
                ),
                _field("list_services_response", 6, f"{prefix}ListServiceResponse", oneof_index=0),
                _field("error_response", 7, f"{prefix}ErrorResponse", oneof_index=0),
            ],
            "FileDescriptorResponse": [
                _field("file_descriptor_proto", 1, "BYTES", label="LABEL_REPEATED")
            ],
            "ExtensionNumberResponse": [
                _field("base_type_name", 1, "STRING"),
                _field("extension_number", 2, "INT32", label="LABEL_REPEATED"),
            ],
            "ListServiceResponse": [
                _field("service", 1, f"{prefix}ServiceResponse", label="LABEL_REPEATED")
            ],
            "ServiceResponse": [_field("name", 1, "STRING")],
            "ErrorResponse": [
                _field("error_code", 1, "INT32"),
                _field("error_message", 2, "STRING"),
            ],
        },
        service=[
            {
                "name": "ServerReflection",
                "method": [
                    _method(
                        "ServerReflectionInfo",
                        f"{prefix}{request}",
                        f"{prefix}{response}",
                        client_streaming=True,
                        server_streaming=True,
                    )
                ],
            }
        ],
    )
    for message, oneof in (
        (file.message_type[0], "message_request"),
        (file.message_type[2], "message_response"),
    ):
        message.oneof_decl.add().name = oneof
    return file


FILES: Final = {file.name: file for file in (_health(), *map(_reflection, REFLECTION_PACKAGES))}
"""The files that describe the standard services, by name."""

_POOL: Final = DescriptorPool()
for _described in FILES.values():
    _POOL.Add(_described)


def message_class(name: str) -> type[Message]:
    """Return the class of a message of the standard services, by its full name."""
    kind: type[Message] = GetMessageClass(_POOL.FindMessageTypeByName(name))
    return kind
