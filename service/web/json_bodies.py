"""Parse JSON documents of requests; errors about an unknown name list the known ones."""

import json
import re
from collections.abc import Iterable
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec

from model.errors import by_likeness
from service.errors import InvalidParameter, MalformedRequest
from service.unique_names import unique_names
from service.web.upload import remove_mark

T = TypeVar("T")

_UNKNOWN_FIELD: Final = re.compile(
    r"Object contains unknown field `(.*?)`(?: - at `(\$[^`]*)`)?", re.DOTALL
)


def decoded(body: bytearray, kind: type[T]) -> T:
    """Parse the JSON of a small body, `{}` if it is empty; raises `MalformedRequest`."""
    remove_mark(body)
    try:
        document = msgspec.json.decode(body or b"{}", type=kind)
        # msgspec keeps the last of equal names; `json` accepts texts beyond JSON, such as NaN.
        json.loads(body or b"{}", object_pairs_hook=unique_names)
        return document
    except (UnicodeDecodeError, RecursionError):
        raise MalformedRequest("invalid body: it is not UTF-8, or nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise MalformedRequest(f"invalid body: {explained(error, kind)}") from None


def explained(error: Exception, kind: Any) -> str:
    """Return the message of a decoding error; for an unknown field, add the known ones.

    Args:
        error: the error of msgspec.
        kind: the decoded type; for an unknown field a struct.
    """
    match = _UNKNOWN_FIELD.fullmatch(str(error))
    if match is None:
        return str(error)
    name = match[1]
    path = match[2] or ""
    for step in re.findall(r"\.(\w+)", path):
        kind = get_type_hints(kind)[step]
        kind = next(iter(get_args(kind)), kind)
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    parent = path.removeprefix("$").removeprefix(".")
    message = f"unknown field {name[:50]!r}; available: {', '.join(by_likeness(name, known))}"
    return f"{parent}: {message}" if parent else message


def require_known(parameters: Iterable[str], known: Iterable[str], where: str = "") -> None:
    """Raise `InvalidParameter` if a parameter is unknown.

    Args:
        parameters: names of the sent parameters.
        known: names of all parameters.
        where: start of the message, which names the owner of the parameters.
    """
    for name in parameters:
        if name not in known:
            names = ", ".join(by_likeness(name, known))
            raise InvalidParameter(f"{where}unknown parameter {name[:50]!r}; available: {names}")
