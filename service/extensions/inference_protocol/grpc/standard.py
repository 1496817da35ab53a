"""Messages of the standard services `grpc.health.v1` and `grpc.reflection`, in a descriptor pool of
their own.

The default pool takes each name once, and other packages of a process may bring the generated ones.

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
"""Clients ask the second one where the first is unknown; their messages are the same."""

_HEALTH_FILE: Final = "grpc/health/v1/health.proto"


def _field(name: str, number: int, kind: str, **more: Any) -> dict[str, Any]:
    type_ = (
        {"type_name": kind, "type": "TYPE_MESSAGE"}
        if kind.startswith(".")
        else {"type": f"TYPE_{kind}"}
    )
    return {"name": name, "number": number, "label": "LABEL_OPTIONAL", **type_, **more}


def _method(name: str, asked: str, answered: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_type": asked, "output_type": answered, **more}


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
    asked, answered = f"{package}.HealthCheckRequest", f"{package}.HealthCheckResponse"
    file = _file(
        _HEALTH_FILE,
        "grpc.health.v1",
        {
            "HealthCheckRequest": [_field("service", 1, "STRING")],
            "HealthCheckResponse": [
                _field("status", 1, "ENUM", type_name=f"{answered}.ServingStatus")
            ],
        },
        service=[
            {
                "name": "Health",
                "method": [
                    _method("Check", asked, answered),
                    _method("Watch", asked, answered, server_streaming=True),
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
    within = f".{package}."
    asked, answered = "ServerReflectionRequest", "ServerReflectionResponse"
    file = _file(
        f"{package.replace('.', '/')}/reflection.proto",
        package,
        {
            asked: [
                _field("host", 1, "STRING"),
                _field("file_by_filename", 3, "STRING", oneof_index=0),
                _field("file_containing_symbol", 4, "STRING", oneof_index=0),
                _field("file_containing_extension", 5, f"{within}ExtensionRequest", oneof_index=0),
                _field("all_extension_numbers_of_type", 6, "STRING", oneof_index=0),
                _field("list_services", 7, "STRING", oneof_index=0),
            ],
            "ExtensionRequest": [
                _field("containing_type", 1, "STRING"),
                _field("extension_number", 2, "INT32"),
            ],
            answered: [
                _field("valid_host", 1, "STRING"),
                _field("original_request", 2, f"{within}{asked}"),
                _field(
                    "file_descriptor_response", 4, f"{within}FileDescriptorResponse", oneof_index=0
                ),
                _field(
                    "all_extension_numbers_response",
                    5,
                    f"{within}ExtensionNumberResponse",
                    oneof_index=0,
                ),
                _field("list_services_response", 6, f"{within}ListServiceResponse", oneof_index=0),
                _field("error_response", 7, f"{within}ErrorResponse", oneof_index=0),
            ],
            "FileDescriptorResponse": [
                _field("file_descriptor_proto", 1, "BYTES", label="LABEL_REPEATED")
            ],
            "ExtensionNumberResponse": [
                _field("base_type_name", 1, "STRING"),
                _field("extension_number", 2, "INT32", label="LABEL_REPEATED"),
            ],
            "ListServiceResponse": [
                _field("service", 1, f"{within}ServiceResponse", label="LABEL_REPEATED")
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
                        f"{within}{asked}",
                        f"{within}{answered}",
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
    found: type[Message] = GetMessageClass(_POOL.FindMessageTypeByName(name))
    return found
