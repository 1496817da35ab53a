"""Endpoints: the functions that answer requests, by method and path.

    router = Router("classify")

    @router.post("/classify", answer=Classification, body=ONE_PICTURE)
    async def classify(request: Request, query: ClassifyQuery) -> Response: ...

    application = Application(lifespan)
    application.set_routes(router.routes)

A framework's layers between a route and its function would cost a request as much of the event
loop's time as all of our code; see docs/decisions/endpoints.md. Here a function is called with a
query that the pydantic model validates, which OpenAPI shows too. Errors rise to
`service.web.middleware.ProblemMiddleware`.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
from pydantic import BaseModel
from starlette.convertors import FloatConvertor, IntegerConvertor
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Router as LifespanRouter
from starlette.routing import compile_path
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from service.errors import MethodNotAllowed, NotFound
from service.web.middleware import request_context
from service.web.query import parse_query, require_no_parameters
from service.web.routes.not_found import no_such_method, no_such_path
from service.web.routes.openapi import Operation, openapi_document
from service.web.routes.request_headers import check_headers, require_acceptable
from service.web.service import ApplicationState

Function = Callable[..., Coroutine[Any, Any, Response | BaseModel]]
"""A coroutine function of the request, or of the request and its query.

It returns a response, or a document that is answered as JSON. The annotation of `query` is a frozen
pydantic model.
"""

_PATH_TYPES = {IntegerConvertor: "integer", FloatConvertor: "number"}
"""JSON types of parameters of paths by their convertors; others are strings."""

_UNDESCRIBED_TYPES: Final = frozenset(["application/json", "application/octet-stream"])

F = TypeVar("F", bound=Function)
Q = TypeVar("Q", bound=BaseModel)


class Endpoint:
    """One method of one path, served by a function.

    Args:
        is_loose: accept and ignore unknown parameters, because probes and browsers add some.
        is_described: describe the endpoint in the OpenAPI document.
        description: further fields of `Operation`.

    Attributes:
        path: path in Starlette's notation, with convertors of its parameters.
        methods: HTTP methods. GET includes HEAD, whose answer the server sends without its body.
    """

    def __init__(
        self,
        method: str,
        path: str,
        function: Function,
        *,
        is_loose: bool = False,
        is_described: bool = True,
        omit_none: bool = False,
        **description: Any,
    ) -> None:
        self.path = path
        self.methods = frozenset({method, "HEAD"} if method == "GET" else {method})
        self.is_described = is_described
        self._regex, self.path_format, self._convertors = compile_path(path)
        self._function = function
        self._omit_none = omit_none
        self._is_loose = is_loose
        query_model = get_type_hints(function).get("query")
        path_types = {
            name: _PATH_TYPES.get(type(convertor), "string")
            for name, convertor in self._convertors.items()
        }
        self.operation = Operation(
            method, self.path_format, function, query_model, path_types, **description
        )

        self._media_types = self.operation.media_types if is_described else _UNDESCRIBED_TYPES
        self._has_formats = query_model is not None and "format" in query_model.model_fields

    @property
    def has_path_parameters(self) -> bool:
        """Return whether the path has parameters."""
        return bool(self._convertors)

    def match(self, path: str) -> dict[str, Any] | None:
        """Return the parameters of a path, or None if the path belongs to another endpoint."""
        match = self._regex.fullmatch(path)
        if match is None:
            return None
        try:
            return {
                name: self._convertors[name].convert(value)
                for name, value in match.groupdict().items()
            }
        except ValueError:  # Python converts at most 4,300 digits
            return None

    @property
    def _name(self) -> str:
        """Return the name of the function, for messages about its faults."""
        return f"{self._function.__module__}.{self._function.__qualname__}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to this path; raises as `parse_query` and the function."""
        context = request_context(scope)
        context.endpoint = self.path_format
        if not self._is_loose:
            check_headers(scope["headers"], scope["method"], self._media_types)
        request = Request(scope, receive)
        query_model = self.operation.query_model
        query_string = scope["query_string"]
        try:
            if query_model is not None:
                answer = await self._function(request, parse_query(query_model, query_string))
            else:
                if query_string and not self._is_loose:
                    require_no_parameters(scope["path"], query_string)
                answer = await self._function(request)
        except SystemExit as error:  # it would end the service
            raise RuntimeError(f"{self._name} called sys.exit") from error
        finally:
            for lease in context.leases:
                lease.release()
        if isinstance(answer, BaseModel):
            content = answer.model_dump_json(exclude_none=self._omit_none, by_alias=True)
            answer = Response(content, self.operation.status, media_type="application/json")
        elif not callable(answer):
            raise TypeError(f"{self._name} returned a {type(answer).__name__}, see `Function`")
        if self._has_formats and "accept" in request.headers:
            accept = ", ".join(request.headers.getlist("accept"))
            remedy = "; the parameter format chooses"
            require_acceptable(accept, [str(answer.media_type)], remedy)
        await answer(scope, receive, send)


class Router:
    """A list of endpoints, which decorators add.

    Args:
        tag: group of the endpoints in the OpenAPI document.
        prefix: start of all paths.
        options: options of all endpoints, see `Endpoint`.
    """

    def __init__(self, tag: str = "", *, prefix: str = "", **options: Any) -> None:
        self.routes: list[Endpoint] = []
        self._prefix = prefix
        self._options = {"tag": tag, **options}

    def get(self, path: str, **options: Any) -> Callable[[F], F]:
        """Add a function for GET; see `Endpoint` for the options."""
        return self._add("GET", path, options)

    def post(self, path: str, **options: Any) -> Callable[[F], F]:
        """Add a function for POST; see `Endpoint` for the options."""
        return self._add("POST", path, options)

    def put(self, path: str, **options: Any) -> Callable[[F], F]:
        """Add a function for PUT; see `Endpoint` for the options."""
        return self._add("PUT", path, options)

    def delete(self, path: str, **options: Any) -> Callable[[F], F]:
        """Add a function for DELETE; see `Endpoint` for the options."""
        return self._add("DELETE", path, options)

    def _add(self, method: str, path: str, options: Mapping[str, Any]) -> Callable[[F], F]:
        def add(function: F) -> F:
            endpoint = Endpoint(
                method, self._prefix + path, function, **{**self._options, **options}
            )
            self.routes.append(endpoint)
            return function

        return add


class Application:
    """The ASGI application, which finds the endpoint of each request.

    Args:
        lifespan: a context around the running application, see Starlette.

    Attributes:
        lifespan: that context.
        routes: all endpoints.
        state: shared objects, as `request.app.state`.
    """

    def __init__(self, lifespan: Lifespan["Application"]) -> None:
        self.routes: Sequence[Endpoint] = ()
        self.state = ApplicationState()
        self.lifespan = lifespan
        self._lifespan = LifespanRouter(lifespan=lifespan)
        self._fixed: Mapping[tuple[str, str], Endpoint] = {}
        self._document = b""

    def set_routes(self, routes: Sequence[Endpoint]) -> None:
        """Set all endpoints; the first that takes a method and a path answers."""
        self.routes = routes
        # Paths without parameters, which need not be matched one by one.
        self._fixed = {
            (method, endpoint.path): endpoint
            for endpoint in reversed(routes)
            if not endpoint.has_path_parameters
            for method in endpoint.methods
        }

    def openapi(self, version: str) -> bytes:
        """Return the OpenAPI document as JSON, which is written once."""
        if not self._document:
            document = openapi_document(
                [endpoint.operation for endpoint in self.routes if endpoint.is_described],
                version=version,
                public=self.state.rules.public,
                keys_required=bool(self.state.service.settings.api_keys),
            )
            self._document = msgspec.json.encode(document)
        return self._document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; raises `NotFound`, `MethodNotAllowed`, and errors of the endpoint."""
        scope["app"] = self
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
            return
        answer = self._fixed.get((scope["method"], scope["path"])) or self._find(scope)
        await answer(scope, receive, send)

    def _find(self, scope: Scope) -> ASGIApp:
        path = scope["path"]
        method = scope["method"]
        allowed: set[str] = set()
        for endpoint in self.routes:
            parameters = endpoint.match(path)
            if parameters is None:
                continue
            if method in endpoint.methods:
                scope["path_params"] = parameters
                return endpoint
            allowed |= endpoint.methods
        if path == "" and method in ("GET", "HEAD"):
            return _redirect_to_page(scope)
        known: dict[str, set[str]] = {}
        for endpoint in self.routes:
            if "." not in endpoint.path:
                known.setdefault(endpoint.path_format, set()).update(endpoint.methods)
        if allowed:
            remedy = no_such_method(method, path, allowed, known)
            raise MethodNotAllowed(
                f"{method} {path}: no such method on this path; {remedy}", sorted(allowed)
            )
        raise NotFound(f"{path}: no such path; {no_such_path(method, path, known)}")


def _redirect_to_page(scope: Scope) -> Response:
    """Redirect the bare prefix of a proxy to the page, whose relative links need a final slash."""
    query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
    return RedirectResponse(f"{request_context(scope).prefix}/{query}", 308)
