"""The routes of the Open Inference Protocol, version 2, under /v2.

A model's name may have slashes, so longer paths must come first. Decorators apply from the bottom
to the top.
"""

import json
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from service.errors import InvalidParameter, MalformedRequest, NotFound
from service.extensions.inference_protocol import VERSION
from service.extensions.inference_protocol.descriptions import (
    model_configuration,
    model_metadata,
    model_statistics,
    repository_entry,
    server_metadata,
)
from service.extensions.inference_protocol.inference import check_version, infer, read
from service.extensions.inference_protocol.tensors import decode_request, encode_answer
from service.web.admit import admit, model_of, service_of
from service.web.body import read_whole
from service.web.json_bodies import decoded, require_known
from service.web.problems import Problem
from service.web.routes.endpoint import Router
from service.web.routes.models import checked_settings, load, require_admin, small_body
from service.web.routes.shared_answers import json_response
from vitserve import __version__

# The protocol has its own OpenAPI document, so ours omits these routes.
router = Router(prefix="/v2", is_described=False)

PROBES: Final = frozenset({"/v2/health/live", "/v2/health/ready"})
"""Paths that machines poll; they need no key."""

ADMIN: Final = r"\w+ /v2/repository/models/.+/(?:un)?load"
"""Regular expression of the requests that need the admin key."""

_HEADER_LENGTH: Final = "inference-header-content-length"
_MAX_DIGITS: Final = 20
_MODEL: Final = "/models/{name:path}"
_VERSIONED: Final = "/models/{name:path}/versions/{version}"


def problem_answer(problem: Problem) -> Response:
    """Return the protocol's answer to an error."""
    content = json.dumps({"error": problem.detail}).encode()
    return Response(content, problem.status, problem.headers, "application/json")


def _name(request: Request) -> str | None:
    """Return the name in the path, or None; raises `NotFound` for an unknown version."""
    check_version(request.path_params.get("version", VERSION))
    name: str | None = request.path_params.get("name")
    return name


@router.get("")
async def v2_server(request: Request) -> Response:
    """Describe the server."""
    swaps = service_of(request).settings.admin_key is not None
    return json_response(server_metadata(__version__, swaps=swaps))


@router.get("/health/live", is_loose=True)
async def v2_live(request: Request) -> Response:
    """Answer 200 while the process lives."""
    return Response()


@router.get("/health/ready", is_loose=True)
@router.get(f"{_MODEL}/ready")
@router.get(f"{_VERSIONED}/ready")
async def v2_ready(request: Request) -> Response:
    """Answer 200 when the model is ready, else 503."""
    service = service_of(request)
    service.check_ready()
    service.models.require_ready(service.models.key(_name(request)))
    return Response()


@router.get(f"{_MODEL}/config")
@router.get(f"{_VERSIONED}/config")
async def v2_configuration(request: Request) -> Response:
    """Return the model's configuration."""
    return json_response(model_configuration((await model_of(request, _name(request))).info))


@router.get("/models/stats")
@router.get(f"{_MODEL}/stats")
@router.get(f"{_VERSIONED}/stats")
async def v2_statistics(request: Request) -> Response:
    """Return the statistics since the start; the name of the model is optional."""
    model = await model_of(request, _name(request))
    return json_response(model_statistics(model.info, service_of(request).metrics))


@router.post(f"{_MODEL}/infer")
@router.post(f"{_VERSIONED}/infer")
async def v2_infer(request: Request) -> Response:
    """Classify the pictures of the tensor `image` or `pixels`."""
    async with admit(request, await model_of(request, _name(request))) as admitted:
        body = await read_whole(admitted)
        decode = partial(decode_request, header_length=_header_length(request))
        inference = await read(admitted, body, decode)
        content, header_length = await infer(admitted, inference, encode_answer)
    if header_length is None:
        return Response(content, media_type="application/json")
    return Response(
        content, headers={_HEADER_LENGTH: str(header_length)}, media_type="application/octet-stream"
    )


def _header_length(request: Request) -> int | None:
    text = request.headers.get(_HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise MalformedRequest("Inference-Header-Content-Length is not a number of bytes")
    return int(text)


@router.get(_MODEL)
@router.get(_VERSIONED)
async def v2_model(request: Request) -> Response:
    """Describe the model: its inputs and outputs."""
    name = _name(request) or ""
    owner, _, action = name.rpartition("/")
    known = service_of(request).models.names()
    if owner in known and name not in known:
        raise NotFound(
            f"{owner}: a model has no GET /{action:.40}; below its path there are "
            "POST /infer, GET /ready, GET /config and GET /stats"
        )
    return json_response(model_metadata((await model_of(request, name)).info))


# The model repository: `service.web.routes.models` does the same by the name of each model.
# https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md


class _Question(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for the index."""

    ready: bool = False


class _Command(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to load or to unload a model."""

    parameters: dict[str, Any] = {}


@router.post("/repository/index")
async def v2_repository_index(request: Request) -> Response:
    """List all models, or with `ready` only the ready models."""
    question = decoded(await small_body(request), _Question)
    models = service_of(request).models.describe()
    return json_response(
        [
            repository_entry(model)
            for model in models
            if model.state == "ready" or not question.ready
        ]
    )


@router.post("/repository/models/{name:path}/load")
async def v2_load(request: Request) -> Response:
    """Load a checkpoint under a name, or an unloaded model again; answer when it serves."""
    service = service_of(request)
    name = request.path_params["name"]
    require_admin(request, service.settings)
    body = await small_body(request)
    fields = checked_settings(decoded(body, _Command).parameters, service.settings)
    if not fields:
        service.models.key(name)
    elif "checkpoint" not in fields:
        raise InvalidParameter("checkpoint: missing, but the other settings need it")
    # A lone checkpoint keeps the model's other settings; without fields, all are kept.
    checkpoint = fields.get("checkpoint") if len(fields) == 1 else fields or None
    status, _ = await load(service, name, checkpoint)
    return json_response(repository_entry(status))


@router.post("/repository/models/{name:path}/unload")
async def v2_unload(request: Request) -> Response:
    """Unload a model; its next request loads it again."""
    service = service_of(request)
    name = request.path_params["name"]
    require_admin(request, service.settings)
    command = decoded(await small_body(request), _Command)
    # `unload_dependents` has no effect, because ensembles do not exist here.
    require_known(command.parameters, ["unload_dependents"])
    await service.models.unload(name)
    return json_response(repository_entry(service.models.status_of(service.models.key(name))))
