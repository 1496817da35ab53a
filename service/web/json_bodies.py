"""Parse JSON documents of requests; name the known fields and parameters beside an unknown one."""

import json
import re
from collections.abc import Iterable
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec

from model.errors import by_likeness
from service.errors import InvalidParameter, MalformedRequest
from service.unique_names import DuplicateName, unique_names
from service.web.upload import remove_mark

T = TypeVar("T")

_SMALL_BYTES: Final = 1 << 14
"""Documents up to this size are parsed again for the message about a repeated name."""

# The quote after a name. A quote before a text follows a bracket, comma, colon or space. `re` finds
# quotes fast because the pattern begins with one.
_NAME_END: Final = re.compile(rb'"(?<![\[{,:\s\\]")\s*:')

_UNKNOWN_FIELD: Final = re.compile(
    r"Object contains unknown field `(.*?)`(?: - at `(\$[^`]*)`)?", re.DOTALL
)


# msgspec's own parser of floats takes 10 us for 1e308, and a body may hold many.
decode_any = msgspec.json.Decoder(float_hook=float).decode


def decoded(body: bytearray, kind: type[T]) -> T:
    """Parse the JSON of a body, `{}` if it is empty; raises `MalformedRequest`."""
    remove_mark(body)
    try:
        document = msgspec.json.decode(body or b"{}", type=kind)
        require_names_once(body, count_names(document))
        return document
    except (UnicodeDecodeError, RecursionError):
        raise MalformedRequest("invalid body: it is not UTF-8, or nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"invalid body: {explained(error, kind)}") from None


def require_names_once(document: bytearray | memoryview, count: int) -> None:
    """Raise `MalformedRequest` if an object of a valid document has a name twice.

    Args:
        count: number of names that the parsed document has at least. The parser keeps only the last
            of equal names.
    """
    written = len(_NAME_END.findall(document))
    if written <= count or written <= count_names(decode_any(document)):
        return
    message = "an object has a name twice: send one"
    try:
        if len(document) <= _SMALL_BYTES:
            json.loads(bytes(document), object_pairs_hook=unique_names)
    except DuplicateName as error:
        message = str(error)
    raise MalformedRequest(f"invalid body: {message}")


def count_names(value: Any) -> int:
    """Return the number of names in the objects of a parsed document."""
    if isinstance(value, dict):
        return len(value) + sum(map(count_names, value.values()))
    if isinstance(value, list):
        return sum(map(count_names, value))
    return 0


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
