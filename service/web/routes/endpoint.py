"""An application and its routes that FastAPI describes and that run without FastAPI's layers.

Between a route and its function FastAPI enters exit stacks, resolves dependencies and translates
errors, which would cost a request as much of the event loop's time as all of our code. Here the
query is validated by the pydantic model that OpenAPI shows, the function is called, and errors rise
to `service.web.middleware.ProblemMiddleware`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_type_hints

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from service.errors import MethodNotAllowed
from service.web.middleware import PROBES, request_context
from service.web.routes.openapi import problems
from service.web.routes.query import parse_query, require_no_parameters

_SCHEME = "api_key"


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
                require_no_parameters(scope["path"], scope["query_string"])
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
