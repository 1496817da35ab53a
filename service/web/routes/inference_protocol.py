"""The Open Inference Protocol, version 2, under /v2; `service.web.inference_protocol` has its tensors and documents.

A model's name may hold slashes, so longer paths come first. Of a function's decorators the lowest is the first.
"""

from __future__ import annotations

import hmac
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.errors import Forbidden, InvalidParameter, MalformedRequest, Unauthorized
from service.settings import Settings
from service.web.api_keys import bearer_token
from service.web.inference_protocol import VERSION
from service.web.inference_protocol.descriptions import (
    model_configuration,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
)
from service.web.inference_protocol.inference import find_model, infer, read
from service.web.inference_protocol.tensors import decode_request, encode_answer
from service.web.request import Model, model_of, service_of
from service.web.routes.endpoint import Endpoint, json_response
from vitserve import __version__

# The protocol has an OpenAPI document of its own, so these routes are not in ours.
router = APIRouter(prefix="/v2", include_in_schema=False, route_class=Endpoint)

PUBLIC: Final = frozenset({"/v2/health/live", "/v2/health/ready"})
"""Paths that are open even when keys are set."""

_HEADER_LENGTH: Final = "inference-header-content-length"
_MAX_DIGITS: Final = 20
_MODEL: Final = "/models/{name:path}"
_VERSIONED: Final = "/models/{name:path}/versions/{version}"


def _model(request: Request) -> Model:
    """Return the model of the path's name, if it has any; raises as `find_model`."""
    parameters = request.path_params
    return find_model(service_of(request), parameters.get("name"), parameters.get("version", VERSION))


@router.get("")
async def v2_server(request: Request) -> Response:
    """Describe the server."""
    swaps = service_of(request).settings.admin_key is not None
    return json_response(server_metadata(__version__, swaps=swaps))


@router.get("/health/live")
async def v2_live(request: Request) -> Response:
    """Answer as long as the process lives."""
    return Response()


@router.get("/health/ready")
@router.get(f"{_MODEL}/ready")
@router.get(f"{_VERSIONED}/ready")
async def v2_ready(request: Request) -> Response:
    """Answer 200 when the model is ready, else 503."""
    service_of(request).check_ready()
    _model(request)
    return Response()


@router.get(f"{_MODEL}/config")
@router.get(f"{_VERSIONED}/config")
async def v2_configuration(request: Request) -> Response:
    """Return the model's configuration."""
    return json_response(model_configuration(_model(request).info))


@router.get("/models/stats")
@router.get(f"{_MODEL}/stats")
@router.get(f"{_VERSIONED}/stats")
async def v2_statistics(request: Request) -> Response:
    """Return the statistics of the model since the start; its name may be left out."""
    return json_response(model_statistics(_model(request).info, service_of(request).metrics))


@router.post(f"{_MODEL}/infer")
@router.post(f"{_VERSIONED}/infer")
async def v2_infer(request: Request) -> Response:
    """Classify the pictures of the tensor `image` or `pixels`."""
    async with service_of(request).admit(request, _model(request)) as admitted:
        body, length = await admitted.read_body(), _header_length(request)
        asked = await read(admitted, body, partial(decode_request, header_length=length))
        content, header_length = await infer(admitted, asked, encode_answer)
    if header_length is None:
        return Response(content, media_type="application/json")
    return Response(content, headers={_HEADER_LENGTH: str(header_length)}, media_type="application/octet-stream")


def _header_length(request: Request) -> int | None:
    text = request.headers.get(_HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise MalformedRequest("Inference-Header-Content-Length is not a number")
    return int(text)


@router.get(_MODEL)
@router.get(_VERSIONED)
async def v2_model(request: Request) -> Response:
    """Describe the model: its inputs and outputs."""
    return json_response(model_metadata(_model(request).info))


# The model repository lists the only model, and swaps its checkpoint. Loading takes the admin key, and no other:
# whoever has it decides what is served.
# https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md

_MAX_BODY: Final = 64 << 10
_MAX_PATH: Final = 4000


class _Body(msgspec.Struct):
    """The body of a request; the protocol allows any parameters."""

    ready: bool = False
    parameters: dict[str, Any] = {}


@router.post("/repository/index")
async def v2_repository_index(request: Request) -> Response:
    """List the only model, which is ready."""
    await _question(request, model_of(request))
    return json_response(repository_index(model_of(request).info))


@router.post("/repository/models/{name:path}/load")
async def v2_load(request: Request) -> Response:
    """Load a checkpoint beside the current model, and answer when it has taken over."""
    service = service_of(request)
    _require_admin(request, service.settings)
    model = find_model(service, request.path_params["name"])
    checkpoint = _checkpoint(await _question(request, model), service.settings)
    service.check_ready()
    await service.models.load(checkpoint)
    return json_response(repository_index(service.model().info)[0])


@router.post("/repository/models/{name:path}/unload")
async def v2_unload(request: Request) -> Response:
    """Refuse: raises `Forbidden`. A service without a model would answer nobody."""
    service = service_of(request)
    _require_admin(request, service.settings)
    find_model(service, request.path_params["name"])
    raise Forbidden("the service has this one model, which is never unloaded: load another checkpoint, or stop it")


def _require_admin(request: Request, settings: Settings) -> None:
    """Raise `Forbidden` if nobody may load, `Unauthorized` without the admin key."""
    if settings.admin_key is None:
        raise Forbidden("loading is off: VIT_ADMIN_KEY is not set")
    expected = settings.admin_key.get_secret_value().encode()
    given = bearer_token(request.headers.get("authorization", "")) or b""
    if not hmac.compare_digest(given, expected):
        wrong = "the admin key is wrong" if given else "the admin key is needed: Authorization: Bearer KEY"
        raise Unauthorized(wrong)


async def _question(request: Request, model: Model) -> _Body:
    """Return the body, which may be empty; raises `MalformedRequest`, `RequestTimeout` and what `read_whole` raises."""
    async with service_of(request).admit(request, model, needs_place=False) as admitted:
        body = await admitted.read_body(_MAX_BODY)
    try:
        return msgspec.json.decode(body or b"{}", type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(f"the body is not what the protocol says: {error}") from None


def _checkpoint(body: _Body, settings: Settings) -> str | None:
    """Return the checkpoint that a body names, None for the configured checkpoint.

    Raises `InvalidParameter`, or `Forbidden` if it does not lie below the folder of the settings.
    """
    unknown = next((name for name in body.parameters if name != "checkpoint"), None)
    if unknown is not None:
        raise InvalidParameter(f"parameter {unknown!r:.50}: there is 'checkpoint' only")
    given = body.parameters.get("checkpoint")
    if given is None:
        return None
    if not isinstance(given, str) or not 0 < len(given.encode()) <= _MAX_PATH or not given.isprintable():
        raise InvalidParameter("parameter 'checkpoint': expected a path")
    if settings.checkpoint_folder is None:
        raise Forbidden("no checkpoint may be named: VIT_CHECKPOINT_FOLDER is not set")
    folder, path = Path(settings.checkpoint_folder).resolve(), Path("/")
    with suppress(OSError, RuntimeError):  # symbolic links in a circle lead nowhere
        path = (folder / given).resolve()
    if not path.is_relative_to(folder):
        raise Forbidden(f"checkpoint {given!r:.200}: it does not lie below VIT_CHECKPOINT_FOLDER")
    return str(path)
