"""What a request asks: its query, with the fields of its form once the body is read.

asked = Asked(request, query, model, what)       the query is checked before the body is read
async with service.admit(request, model) as admitted:
    pictures = await asked.read(admitted)        fields of the form count as parameters of the query
    ... asked.query, asked.wanted
"""

from collections.abc import Callable, Collection
from typing import Generic, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel
from starlette.requests import Request

from model.errors import InputError
from service.engine.messages import ModelInfo
from service.errors import InvalidParameter, MalformedRequest
from service.web.admitted import AdmittedRequest
from service.web.picture import require_file
from service.web.routes.endpoint import parameters_of, validated
from service.web.service import Model, model_of
from service.web.upload import FormFields, UploadedFile
from vitserve.documents import FIELD

Q = TypeVar("Q", bound=BaseModel)
R = TypeVar("R")


class Asked(Generic[Q, R]):
    """A request's query, and what it asks of a model.

    An error of the query is raised at once. Only if the address has no parameters, and the form may
    have some, is it raised after the body is read.

    Args:
        what: returns what a query asks of a model.
        model: that the query names.
        name_of: returns which model a query names.

    Attributes:
        query: with the fields of the form, once it is read.

    Raises:
        InputError, InvalidParameter: as `what`.
    """

    def __init__(
        self,
        request: Request,
        query: Q,
        model: Model,
        what: Callable[[Q, ModelInfo], R],
        name_of: Callable[[Q], str | None] = lambda query: getattr(query, "model", None),
    ) -> None:
        self.query = query
        self._request = request
        self._what = what
        self._name_of = name_of
        self._results: list[R] = []
        self._early: Exception | None = None
        try:
            self._results.append(what(query, model.info))
        except (InputError, InvalidParameter) as error:
            is_form = (
                request.headers.get("content-type", "").lower().startswith("multipart/form-data")
            )
            if request.scope["query_string"] or not is_form:
                raise
            self._early = error

    @property
    def wanted(self) -> R:
        """Return what the query asks of the model; raises as this class."""
        if self._early is not None:
            raise self._early
        return self._results[-1]

    async def read(
        self, admitted: AdmittedRequest, *, fields: Collection[str] = (FIELD,)
    ) -> bytearray:
        """Read the only picture in the body; raises as `read_all`."""
        [file] = await self.read_all(admitted, several=False, fields=fields)
        return require_file(file)

    async def read_all(
        self, admitted: AdmittedRequest, *, several: bool = True, fields: Collection[str] = (FIELD,)
    ) -> list[UploadedFile]:
        """Read the pictures in the body, and let the form's fields count; no slot is taken yet.

        Raises:
            MalformedRequest: a field is given differently in the address.
            InvalidParameter, InputError: a value is not allowed.
            UnknownModel, and what `RequestBody.read_files` raises.
        """
        upload = await admitted.body.read_files(
            parameters_of(type(self.query)), several=several, fields=fields
        )
        if upload.fields:
            before = self._name_of(self.query)
            self.query = merged(self.query, self._request.scope["query_string"], upload.fields)
            name = self._name_of(self.query)
            if name != before and not _names_several(name):
                admitted.choose(await model_of(self._request, name))
            self._results.append(self._what(self.query, admitted.model.info))
            self._early = None
        return upload.files


def _names_several(name: str | None) -> bool:
    return name is not None and ("," in name or name == "*")


def merged(query: Q, query_string: bytes, fields: FormFields) -> Q:
    """Return a query with the fields of a form.

    Raises:
        MalformedRequest: a field is given differently in the address.
        InvalidParameter: a value is not allowed.
    """
    addressed = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    sent = [(name, value) for name, values in fields.items() for value in values]
    both = validated(type(query), [*(pair for pair in addressed if pair[0] not in fields), *sent])
    names = dict(zip(parameters_of(type(query)), type(query).model_fields, strict=True))
    for name, value in addressed:
        if name in fields and getattr(query, names[name]) != getattr(both, names[name]):
            differ = f"{value!r:.50} in the address and {fields[name][-1]!r:.50} in the form"
            raise MalformedRequest(f"{name}: {differ}: send one")
    return both
