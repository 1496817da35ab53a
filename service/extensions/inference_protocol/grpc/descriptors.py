"""Descriptors and messages of this port's services, from `services.binpb`.

`make protocol` writes that file from the folder `proto`. The descriptors have a pool of their own:
the default pool accepts each name once, and other packages may register the same names.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

FILES: Final = FileDescriptorSet.FromString(
    Path(__file__).with_name("services.binpb").read_bytes()
).file

POOL: Final[Any] = DescriptorPool()
for _file in FILES:
    POOL.Add(_file)


@cache
def message_class(name: str) -> Any:
    """Return the class of a message by its name, by default of the package `inference`."""
    full_name = name if "." in name else f"inference.{name}"
    return GetMessageClass(POOL.FindMessageTypeByName(full_name))
