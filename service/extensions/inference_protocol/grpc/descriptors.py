"""Descriptors of this port's services, from `services.binpb`, which `make protocol` writes.

They have a pool of their own: the default pool accepts each name once, and other packages may
register the names of the standard services.
"""

from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

FILES: Final = FileDescriptorSet.FromString(
    Path(__file__).with_name("services.binpb").read_bytes()
).file

POOL: Final[Any] = DescriptorPool()
for _file in FILES:
    POOL.Add(_file)


def message_class(name: str) -> type[Message]:
    """Return the class of a message of the standard services, by its full name."""
    kind: type[Message] = GetMessageClass(POOL.FindMessageTypeByName(name))
    return kind
