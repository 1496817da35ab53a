"""The query of a request: parsed from its address, and completed by the fields of its form.

    form = FormQuery(request, query, model, ClassifyQuery.requested)    checks the address
    async with admit(request, model) as admitted:
        picture = await form.read_file(admitted)                        reads the body
        ... form.query, form.requested

Unknown, repeated and wrong parameters are refused by name, in the address as in the form.
"""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, Generic, TypeVar, get_origin
from urllib.parse import parse_qsl

from pydantic import BaseModel, Field, ValidationError
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request

from service.engine.messages import ModelInfo
from service.errors import InvalidParameter, MalformedRequest
from service.models.generation import Lease
from service.web.admitted import AdmittedRequest
from service.web.json_bodies import require_known
from service.web.picture import require_file
from service.web.service import model_of
from service.web.upload import FormFields, UploadedFile
from vitserve.documents import FIELD

Q = TypeVar("Q", bound=BaseModel)
R = TypeVar("R")

_MAX_PARAMETERS: Final = 64

Absent = SkipJsonSchema[None]
"""The type of None as the default of a parameter, which OpenAPI does not name."""

ModelName = Annotated[
    str | Absent, Field(description="a name from GET /models; default the default model")
]
"""The parameter `model`."""


class ModelQuery(BaseModel, frozen=True):
    """A query whose only parameter is the name of a model."""

    model: ModelName = None


def parameters_of(query_model: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of a query's parameters in a URL."""
    return tuple(field.alias or name for name, field in query_model.model_fields.items())


def names_several(model: str | None) -> bool:
    """Return whether the parameter `model` names several models."""
    return model is not None and ("," in model or model == "*")


@lru_cache(maxsize=64)
def parse_query(query_model: type[BaseModel], query_string: bytes) -> BaseModel:
    """Return the query of an address; raises as `validated`.

    The last queries are cached, because most requests have one of a few.
    """
    if query_string.count(b"&") >= _MAX_PARAMETERS:
        raise InvalidParameter(f"more than {_MAX_PARAMETERS} parameters")
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
        return query_model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        message = str(first["msg"])
        raise InvalidParameter(f"{first['loc'][0]}: {message[:1].lower()}{message[1:]}") from None


def require_no_parameters(path: str, query_string: bytes) -> None:
    """Raise `InvalidParameter` if the address of a route without parameters has one."""
    for name, _ in _pairs(query_string):
        raise InvalidParameter(f"unknown parameter {name[:50]!r}; {path} takes none")


def _pairs(query_string: bytes) -> list[tuple[str, str]]:
    return parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)


class FormQuery(Generic[Q, R]):
    """The query of a request, and the outputs that it requests of a model.

    A wrong query is refused before the body is read. An address without parameters is checked after
    the body if that is a form, because the form may have the parameters.

    Args:
        model: the model that the address names.
        parse: returns the outputs that a query requests of a model.

    Attributes:
        query: with the fields of the form, once the body is read.
        requested: the result of `parse`, once the body is read.

    Raises:
        InputError, InvalidParameter: as `parse`.
    """

    requested: R

    def __init__(
        self, request: Request, query: Q, model: Lease, parse: Callable[[Q, ModelInfo], R]
    ) -> None:
        self.query = query
        self._request = request
        self._parse = parse
        kind = request.headers.get("content-type", "").lower()
        is_form = kind.startswith("multipart/form-data")
        self._is_parsed = bool(request.scope["query_string"]) or not is_form
        if self._is_parsed:
            self.requested = parse(query, model.info)

    async def read_file(
        self, admitted: AdmittedRequest, *, fields: Collection[str] = (FIELD,)
    ) -> bytearray:
        """Return the only picture in the body; raises as `read_files`."""
        [file] = await self.read_files(admitted, several=False, fields=fields)
        return require_file(file)

    async def read_files(
        self, admitted: AdmittedRequest, *, several: bool = True, fields: Collection[str] = (FIELD,)
    ) -> list[UploadedFile]:
        """Return the pictures in the body, and complete the query by the other fields of a form.

        Args:
            several: whether more than one picture is allowed.
            fields: names of the form fields with pictures.

        Raises:
            MalformedRequest: a field has another value in the address.
            InvalidParameter, InputError: a value is wrong.
            UnknownModel, and what `RequestBody.read_files` raises.
        """
        parameters = parameters_of(type(self.query))
        upload = await admitted.body.read_files(parameters, several=several, fields=fields)
        if upload.fields:
            await self._complete(admitted, upload.fields)
        if upload.fields or not self._is_parsed:
            self.requested = self._parse(self.query, admitted.model.info)
        return upload.files

    async def _complete(self, admitted: AdmittedRequest, fields: FormFields) -> None:
        addressed = _model_name(self.query)
        self.query = merged(self.query, self._request.scope["query_string"], fields)
        name = _model_name(self.query)
        if name != addressed and not names_several(name):
            admitted.model = await model_of(self._request, name)


def _model_name(query: BaseModel) -> str | None:
    name: str | None = getattr(query, "model", None)
    return name


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
