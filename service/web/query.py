"""The query of a request, parsed from its address and the fields of its form.

Unknown, repeated and wrong parameters are refused by name, in the address as in the form.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, TypeVar, get_origin

from pydantic import BaseModel, Field, ValidationError
from pydantic.json_schema import SkipJsonSchema

from service.errors import InvalidParameter, MalformedRequest
from service.web.json_bodies import require_known
from service.web.upload import FormFields

Q = TypeVar("Q", bound=BaseModel)

_MAX_PARAMETERS: Final = 64
_MAX_BARE_PERCENTS: Final = 64
_BARE_PERCENT: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")

Absent = SkipJsonSchema[None]
"""Type of None as a parameter's default; OpenAPI leaves it out."""

ModelName = Annotated[
    str | Absent,
    Field(description="a name from GET /models; without it, the default model answers"),
]
"""The parameter `model`."""


class ModelQuery(BaseModel, frozen=True):
    """A query whose only parameter is the name of a model."""

    model: ModelName = None


@lru_cache(maxsize=64)
def parameters_of(query_model: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of a query's parameters in a URL."""
    return tuple(field.alias or name for name, field in query_model.model_fields.items())


@lru_cache(maxsize=64)
def parse_query(query_model: type[BaseModel], query_string: bytes) -> BaseModel:
    """Return the query of an address; raises as `validated`.

    Recent queries are cached, because most requests repeat one of a few.
    """
    return validated(query_model, _pairs(query_string))


def validated(query_model: type[Q], pairs: Sequence[tuple[str, str]]) -> Q:
    """Return a query of names and values; a field of type tuple takes all values of its name.

    Raises:
        InvalidParameter: a parameter is missing, unknown, sent twice, or has a wrong value.
    """
    tuples = {
        name
        for name, field in query_model.model_fields.items()
        if get_origin(field.annotation) is tuple
    }
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in tuples:
            values[name] = (*values.get(name, ()), value)
        elif values.setdefault(name, value) != value:
            raise InvalidParameter(
                f"{name:.50}: given as {values[name]!r:.50} and as {value!r:.50}: send one"
            )
    known = parameters_of(query_model)
    require_known(values, known)
    try:
        query = query_model.model_validate(values)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_context=False, include_input=False)
        parameter = first["loc"][0]
        message = f"{first['msg'][:1].lower()}{first['msg'][1:]}".replace(
            ", unable to interpret input", ": true or false"
        )
        for other in others:  # a parameter may have a value of several types
            if other["loc"][0] == parameter and other["type"] == "literal_error":
                message += f", or {other['msg'].removeprefix('Input should be ')}"
        raise InvalidParameter(f"{parameter}: {message}") from None
    for parameter, attribute in zip(known, query_model.model_fields, strict=True):
        # Python reads 0_1 as 1, but its sender may mean 0.1.
        if "_" in values.get(parameter, "") and isinstance(getattr(query, attribute), int | float):
            raise InvalidParameter(f"{parameter}: {values[parameter]!r:.50} is not a number")
    return query


def require_no_parameters(path: str, query_string: bytes) -> None:
    """Raise `InvalidParameter` if an address has parameters, but its route takes none."""
    pairs = _pairs(query_string)
    if pairs:
        raise InvalidParameter(f"unknown parameter {pairs[0][0][:50]!r}; {path} takes none")


def _pairs(query_string: bytes) -> list[tuple[str, str]]:
    """Return the names and values in an address.

    Raises:
        InvalidParameter: there are too many, or they are not UTF-8.
    """
    if query_string.count(b"&") >= _MAX_PARAMETERS:
        raise InvalidParameter(f"more than {_MAX_PARAMETERS} parameters")
    query_string, bare = _BARE_PERCENT.subn(b"%25", query_string, _MAX_BARE_PERCENTS + 1)
    if bare > _MAX_BARE_PERCENTS:
        raise InvalidParameter("the query has many % without two digits: send each as %25")
    pairs = [pair.partition(b"=") for pair in query_string.split(b"&") if pair]
    try:
        return [(_decoded(name), _decoded(value)) for name, _, value in pairs]
    except UnicodeDecodeError:
        raise InvalidParameter("the query is not UTF-8: send percent-encoded UTF-8") from None


def _decoded(encoded: bytes) -> str:
    """Return a percent-encoded text; `urllib` would take 15 ms for 20,000 escapes."""
    escaped = encoded.replace(b"+", b" ").replace(b"\\", b"%5c").replace(b"%", b"\\x")
    return escaped.decode("unicode_escape").encode("latin-1").decode()


def merged(query: Q, query_string: bytes, fields: FormFields) -> Q:
    """Return a query with the fields of a form.

    Raises:
        MalformedRequest: a field has another value in the address.
        InvalidParameter: a value is wrong.
    """
    addressed = _pairs(query_string)
    pairs = [(name, value) for name, value in addressed if name not in fields]
    pairs += [(name, value) for name, values in fields.items() for value in values]
    query_model = type(query)
    both = validated(query_model, pairs)
    attributes = dict(zip(parameters_of(query_model), query_model.model_fields, strict=True))
    for name, value in addressed:
        if name not in fields:
            continue
        attribute = attributes[name]
        if getattr(query, attribute) != getattr(both, attribute):
            raise MalformedRequest(
                f"{name}: {value!r:.50} in the address and {fields[name][-1]!r:.50} in the form: "
                "send one"
            )
    return both
