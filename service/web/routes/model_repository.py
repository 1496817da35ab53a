"""The protocol's model repository under /v2/repository: lists the only model, and swaps its checkpoint.

Loading takes the admin key, and no other: whoever has it decides what is served.
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""

from __future__ import annotations

import hmac
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.errors import Forbidden, InvalidParameter, MalformedRequest, Unauthorized
from service.settings import Settings
from service.web.api_keys import bearer_token
from service.web.inference_protocol.descriptions import repository_index
from service.web.inference_protocol.inference import find_model
from service.web.request import Model, model_of, service_of
from service.web.routes.endpoint import Endpoint, json_response

# The protocol has an OpenAPI document of its own, so these routes are not in ours.
router = APIRouter(prefix="/v2/repository", include_in_schema=False, route_class=Endpoint)

_MAX_BODY: Final = 64 << 10
_MAX_PATH: Final = 4000


class _Body(msgspec.Struct):
    """The body of a request; the protocol allows any parameters."""

    ready: bool = False
    parameters: dict[str, Any] = {}


@router.post("/index")
async def v2_repository_index(request: Request) -> Response:
    """List the only model, which is ready."""
    await _read(request, model_of(request))
    return json_response(repository_index(model_of(request).info))


@router.post("/models/{name:path}/load")
async def v2_load(request: Request) -> Response:
    """Load a checkpoint beside the current model, and answer when it has taken over."""
    service = service_of(request)
    _require_admin(request, service.settings)
    model = find_model(service, request.path_params["name"])
    checkpoint = _checkpoint(await _read(request, model), service.settings)
    service.check_open()
    await service.models.load(checkpoint)
    return json_response(repository_index(service.model().info)[0])


@router.post("/models/{name:path}/unload")
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


async def _read(request: Request, model: Model) -> _Body:
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
