"""The JSON documents of requests, whose unknown fields are refused with the nearest names."""

import re
from collections.abc import Iterable
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec

from model.errors import by_likeness
from service.errors import InvalidParameter, MalformedRequest

T = TypeVar("T")

_UNKNOWN_FIELD: Final = re.compile(
    r"Object contains unknown field `(.*?)`(?: - at `(\$[^`]*)`)?", re.DOTALL
)


def decoded(body: bytearray, kind: type[T]) -> T:
    """Return the JSON of a body, an empty object where it is empty; raises `MalformedRequest`."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (UnicodeDecodeError, RecursionError):
        raise MalformedRequest(
            "the body is not what is expected: it is not UTF-8, or nested too deeply"
        ) from None
    except msgspec.MsgspecError as error:
        raise MalformedRequest(
            f"the body is not what is expected: {explained(error, kind)}"
        ) from None


def explained(error: Exception, kind: Any) -> str:
    """Return the message of an error of decoding, with the fields that there are for an unknown
    one.

    Args:
        error: the error of msgspec.
        kind: the type that was decoded: for an unknown field a struct.
    """
    match = _UNKNOWN_FIELD.fullmatch(str(error))
    if match is None:
        return str(error)
    name, path = match[1], match[2] or ""
    for step in re.findall(r"\.(\w+)", path):
        kind = get_type_hints(kind)[step]
        kind = next(iter(get_args(kind)), kind)
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    place = path.removeprefix("$").removeprefix(".")
    where = f"{place}: " if place else ""
    return f"{where}unknown field {name!r:.50}; there are {', '.join(by_likeness(name, known))}"


def require_known(parameters: Iterable[str], known: Iterable[str], where: str = "") -> None:
    """Raise `InvalidParameter` if one of the names of parameters is unknown.

    Args:
        parameters: names of the parameters that were sent.
        known: names of the parameters that there are.
        where: start of the message: whose parameters they are.
    """
    for name in parameters:
        if name not in known:
            remedy = ", ".join(by_likeness(name, known))
            raise InvalidParameter(f"{where}{name:.50}: no such parameter; there are {remedy}")
