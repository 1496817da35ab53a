"""An application and its routes that FastAPI describes and that run without FastAPI's layers.

Between a route and its function FastAPI enters exit stacks, resolves dependencies and translates
errors, which would cost a request as much of the event loop's time as all of our code. Here the
query is validated by the pydantic model that OpenAPI shows, the function is called, and errors rise
to `service.web.middleware.ProblemMiddleware`.
"""

import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec
import numpy as np
from fastapi import FastAPI
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from model.errors import by_likeness, nearest
from service.errors import InvalidParameter, MethodNotAllowed, NotFound
from service.web.middleware import PROBES, request_context
from service.web.problems import MEDIA_TYPE
from vitserve.documents import FIELD, ProblemDocument

Q = TypeVar("Q", bound=BaseModel)

_MAX_PARAMETERS = 64

# Characters of an unknown path that are compared with the routes.
_MAX_LIKENED = 100

# What TorchServe, TensorFlow Serving, SageMaker and hand-written servers call a route of ours.
_OTHERS_NAMES = {
    "predict": "/classify",
    "prediction": "/classify",
    "infer": "/classify",
    "inference": "/classify",
    "upload": "/classify",
    "batch": "/classify/batch",
    "explain": "/attention",
    "heatmap": "/attention",
    "features": "/embed",
    "health": "/healthz",
    "live": "/healthz",
    "livez": "/healthz",
    "ready": "/readyz",
    "classes": "/labels",
    "swagger": "/docs",
    "redoc": "/docs",
}

Absent = SkipJsonSchema[None]
"""None as the default of a parameter: a query cannot hold null, so OpenAPI does not name it."""

NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
"""The name in a path."""

BINARY = {"type": "string", "format": "binary"}
_SCHEME = "api_key"


def _body(file: dict[str, Any], **raw: Any) -> dict[str, Any]:
    """Return the description of a body: a form with the field `file`, or one of the media types
    `raw`.
    """
    form = {"schema": {"type": "object", "required": [FIELD], "properties": {FIELD: file}}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": form, **raw}}}


_JSON = {
    "type": "object",
    "required": ["image"],
    "properties": {"image": {"type": "string", "format": "byte"}},
}
ONE_PICTURE = _body(
    BINARY,
    **{"application/octet-stream": {"schema": BINARY}, "application/json": {"schema": _JSON}},
)
SEVERAL_PICTURES = _body({"type": "array", "minItems": 1, "items": BINARY})


ModelName = Annotated[
    str | Absent, Field(description="which of GET /models answers; default the default one")
]
"""The parameter `model`."""


class ModelQuery(BaseModel, frozen=True):
    """The query of what is asked of a model and has no other parameter."""

    model: ModelName = None


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of a route's error answers, which all have the same schema."""
    content = {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{ProblemDocument.__name__}"}}}
    return {
        status: {"description": "Problem details (RFC 9457)", "content": content}
        for status in statuses
    }


class Application(FastAPI):
    """FastAPI without its layers: `ProblemMiddleware` answers errors, and no route leaves a context
    open.

    Attributes:
        endpoints: by method and path those whose path has no parameters, which are found without
        matching all paths.
    """

    endpoints: "Mapping[tuple[str, str], Endpoint]" = MappingProxyType({})

    def set_routes(self, routes: Sequence[BaseRoute]) -> None:
        """Set all routes; the first that takes a method and a path answers."""
        self.router.routes = list(routes)
        self.endpoints = {
            (method, route.path): route
            for route in reversed(routes)
            if isinstance(route, Endpoint) and not route.param_convertors
            for method in route.allowed_methods
        }

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, which names the operations that take a key."""
        if self.openapi_schema is None:
            document = super().openapi()
            _describe_keys(document, self.state.public, required=self.state.keys_required)
            _describe_form_fields(document)
        return super().openapi()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the endpoint of the path answer, or the router."""
        scope["app"] = self
        endpoint = self.endpoints.get((scope.get("method", ""), scope.get("path", "")))
        await (self.router if endpoint is None else endpoint.handle)(scope, receive, send)


class Endpoint(APIRoute):
    """One method of one path, served by `function(request)` or `function(request, query)`.

    The function is a coroutine. Its `query` is annotated `Annotated[Model, fastapi.Query()]`, with
    a frozen pydantic model. It returns a response, or a pydantic model that is answered as JSON
    with the status of the route. Its name is the operation's id in OpenAPI, and names the method of
    generated clients.

    Unknown parameters are refused, but for probes and the files of pages, where machines and
    browsers add some.

    Attributes:
        is_loose: whether the route takes any parameters; they have no effect.
    """

    is_loose = False

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        options["operation_id"] = endpoint.__name__
        super().__init__(path, endpoint, **options)
        # Starlette's ends with `$`, which matches before a line break at the end of the path, too.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")
        self._query_model: type[BaseModel] | None = get_type_hints(endpoint).get("query")
        self.is_loose = self.is_loose or path in PROBES

    @property
    def allowed_methods(self) -> set[str]:
        """Return the methods of the route; GET implies HEAD, whose answer the server sends without
        its body.
        """
        methods = set(self.methods or ())
        return methods | {"HEAD"} if "GET" in methods else methods

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match HEAD as GET."""
        if scope["type"] == "http" and scope["method"] == "HEAD" and "GET" in (self.methods or ()):
            return super().matches({**scope, "method": "GET"})
        return super().matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to this path; raises `MethodNotAllowed`, and what `parse_query` and the
        function raise.
        """
        if scope["method"] not in self.allowed_methods:
            routes = (
                route for route in scope["app"].routes if route.path_regex.match(scope["path"])
            )
            allowed = sorted({method for route in routes for method in route.allowed_methods})
            wrong = f"{scope['method']} {scope['path']}: no such method on this path; there are {', '.join(allowed)}"
            raise MethodNotAllowed(wrong, allowed)
        request_context(scope).endpoint = self.path_format
        request = Request(scope, receive)
        if self._query_model is None:
            if scope["query_string"] and not self.is_loose:
                _require_no_parameters(scope)
            answer = await self.endpoint(request)
        else:
            answer = await self.endpoint(
                request, parse_query(self._query_model, scope["query_string"])
            )
        if isinstance(answer, BaseModel):
            content = answer.model_dump_json(
                exclude_none=self.response_model_exclude_none, by_alias=True
            )
            answer = Response(content, self.status_code or 200, media_type="application/json")
        await answer(scope, receive, send)


class PageEndpoint(Endpoint):
    """The route of a page or of one of its files, which browsers ask for with parameters of their
    own.
    """

    is_loose = True


def _require_no_parameters(scope: Scope) -> None:
    """Raise `InvalidParameter` if the address has a parameter, where the route has none."""
    sent = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    if sent:
        raise InvalidParameter(f"{sent[0][0]:.50}: no such parameter; {scope['path']} has none")


def json_response(document: Any) -> Response:
    """Return what msgspec encodes as JSON, as the documents of the Open Inference Protocol are."""
    return Response(msgspec.json.encode(document), media_type="application/json")


def to_json(document: BaseModel) -> bytes:
    """Return a document as JSON, without the fields that are None."""
    return document.model_dump_json(exclude_none=True, by_alias=True).encode()


def npy_response(values: NDArray[np.float32], headers: Mapping[str, str] | None = None) -> Response:
    """Return an array as a NumPy file."""
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return Response(buffer.getvalue(), media_type="application/x-npy", headers=headers)


async def no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request that no route takes: raises `NotFound`, which names the route that was
    probably meant.

    The bare prefix of a proxy leads to the page, whose relative links need the slash at its end.
    """
    if scope["path"] == "" and scope["method"] in ("GET", "HEAD"):
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        answer = RedirectResponse(f"{request_context(scope).prefix}/{query}", 308)
        await answer(scope, receive, send)
        return
    methods: dict[str, set[str]] = {}
    for route in scope["app"].routes:
        if isinstance(route, Endpoint) and "." not in route.path:
            methods.setdefault(route.path_format, set()).update(route.allowed_methods)
    meant = _meant(scope["path"], methods)
    if not meant:
        raise NotFound(f"{scope['path']}: no such path; GET /docs lists all")
    method = scope["method"] if scope["method"] in methods[meant] else min(methods[meant])
    raise NotFound(f"{scope['path']}: no such path; did you mean {method} {meant}?")


def _meant(path: str, known: Collection[str]) -> str:
    """Return the path of the route that an unknown path was probably meant to be, or an empty text.

    It is one that the path ends with, beside slashes, case, and a prefix (`/api/v1/classify/`), one
    that has another name in other servers, or the one most like the path.
    """
    parts = [part for part in re.split("[/:]", path[:_MAX_LIKENED].lower()) if part]
    for start in range(len(parts)):
        tail = "/".join(parts[start:])
        if f"/{tail}" in known:
            return f"/{tail}"
        if tail in _OTHERS_NAMES:
            return _OTHERS_NAMES[tail]
    return nearest("/" + "/".join(parts), known)


def parameters_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of a query's parameters, as they are sent."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


@lru_cache(maxsize=64)
def parse_query(model: type[BaseModel], query_string: bytes) -> BaseModel:
    """Return a request's query as `model`; raises as `validated`.

    Queries are cached, as most requests have one of a few.
    """
    if query_string.count(b"&") >= _MAX_PARAMETERS:
        raise InvalidParameter(f"more than {_MAX_PARAMETERS} parameters")
    return validated(model, parse_qsl(query_string.decode("latin-1"), keep_blank_values=True))


def validated(model: type[Q], pairs: Sequence[tuple[str, str]]) -> Q:
    """Return parameters as a query; a tuple has all values of a repeated one.

    Raises:
        InvalidParameter: a parameter is missing, unknown, given twice or not what the model allows.
    """
    query: dict[str, Any] = {}
    tuples = {
        name for name, field in model.model_fields.items() if get_origin(field.annotation) is tuple
    }
    for name, value in pairs:
        if name in tuples:
            query[name] = (*query.get(name, ()), value)
        elif query.setdefault(name, value) != value:
            raise InvalidParameter(
                f"{name:.50}: given as {query[name]!r:.50} and as {value!r:.50}: send one"
            )
    known = parameters_of(model)
    unknown = next((name for name in query if name not in known), None)
    if unknown is not None:
        raise InvalidParameter(
            f"{unknown:.50}: no such parameter; there are {', '.join(by_likeness(unknown, known))}"
        )
    try:
        return model.model_validate(query)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        message = str(first["msg"])
        raise InvalidParameter(f"{first['loc'][0]}: {message[:1].lower()}{message[1:]}") from None


def _describe_form_fields(document: dict[str, Any]) -> None:
    """Add to an OpenAPI document, in place, that parameters of a query may be fields of its form."""
    for operations in document["paths"].values():
        for operation in operations.values():
            form = operation.get("requestBody", {}).get("content", {}).get("multipart/form-data")
            parameters = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
            if form is not None and parameters:
                fields = {each["name"]: each["schema"] for each in parameters}
                schema = form["schema"]
                form["schema"] = {**schema, "properties": {**schema["properties"], **fields}}


def _describe_keys(document: dict[str, Any], public: Collection[str], *, required: bool) -> None:
    """Add to an OpenAPI document, in place, which operations take a key, and the 401 that they may
    answer.

    Paths in `public` take none. A key is `required` where keys are set, else documented as
    optional.
    """
    document["components"]["securitySchemes"] = {
        _SCHEME: {
            "type": "http",
            "scheme": "bearer",
            "description": "`Authorization: Bearer KEY`, with a key of `VIT_API_KEYS`",
        }
    }
    refusal = {str(status): answer for status, answer in problems(401).items()}
    security: list[dict[str, list[str]]] = [{_SCHEME: []}]
    for path, operations in document["paths"].items():
        if path in public:
            continue
        for operation in operations.values():
            operation["security"] = security if required else [{}, *security]
            operation["responses"] = dict(sorted((operation["responses"] | refusal).items()))
