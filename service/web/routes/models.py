"""GET, PUT and DELETE /models. PUT and DELETE require the admin key.

The key's owner chooses the served models, from files below VIT_CHECKPOINT_FOLDER.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from service.engine.backbones import Checkpoint
from service.errors import (
    CheckpointRefused,
    Forbidden,
    InvalidParameter,
    NameTaken,
    Unauthorized,
    UnknownModel,
)
from service.model_settings import PATHS
from service.models.folder import check_name, model_settings
from service.models.paths import located
from service.settings import Settings
from service.web.admit import admit, service_of
from service.web.api_keys import bearer_token, holds_admin_key
from service.web.body import read_whole
from service.web.json_bodies import decoded
from service.web.routes.endpoint import Router
from service.web.routes.openapi import problems
from service.web.routes.shared_answers import to_json
from service.web.service import Service
from vitserve.documents import ListedModel

router = Router("models")

ADMIN: Final = "(?:PUT|DELETE) /models/.+"
"""Regular expression of the requests that need the admin key."""

_MAX_BODY: Final = 64 << 10
_SETTINGS: Final = {
    "required": True,
    "content": {"application/json": {"schema": {"type": "object"}}},
}


@router.get("/models", answer=list[ListedModel])
async def models(request: Request) -> Response:
    """List all models by name. Models that share a backbone have the same `backbone`."""
    listed = b",".join(to_json(model) for model in service_of(request).models.describe())
    return Response(b"[%b]" % listed, media_type="application/json")


@router.put(
    "/models/{name:path}",
    answer=ListedModel,
    body=_SETTINGS,
    responses=problems(400, 401, 403, 408, 409, 413, 422, 503)
    | {201: {"model": ListedModel, "description": "A new name"}},
)
async def put_model(request: Request) -> Response:
    """Load or replace a model, and answer when it serves.

    The body has the settings of a `NAME.toml`. The previous version answers the requests that it
    has admitted. A failed load changes nothing.
    """
    service = service_of(request)
    name = request.path_params["name"]
    require_admin(request, service.settings)
    body = await small_body(request)
    checked = checked_settings(decoded(body, dict[str, Any]), service.settings)
    if "checkpoint" not in checked:
        raise InvalidParameter("checkpoint: missing; expected the path of a checkpoint")
    status, is_new = await load(service, name, checked | {"model_name": name})
    return Response(to_json(status), 201 if is_new else 200, media_type="application/json")


@router.delete(
    "/models/{name:path}",
    status=204,
    responses=problems(401, 403, 404, 409),
)
async def delete_model(request: Request) -> Response:
    """Remove a model, which still answers its admitted requests. The default model stays."""
    service = service_of(request)
    name = request.path_params["name"]
    if name in service.models.heads:  # no key deletes a head here
        service.models.require_changeable(name)
    require_admin(request, service.settings)
    await service.models.delete(name)
    return Response(status_code=204)


def require_admin(request: Request, settings: Settings) -> None:
    """Raise an error unless the request has the admin key.

    Raises:
        Unauthorized: the key is missing or unknown.
        Forbidden: the key is not the admin key, or VIT_ADMIN_KEY is not set.
    """
    authorization = request.headers.get("authorization", "")
    needed = "the admin key is needed: Authorization: Bearer KEY"
    if settings.api_keys and not authorization:
        raise Unauthorized(needed)
    if settings.admin_key is None:
        raise Forbidden("loading is off: VIT_ADMIN_KEY is not set")
    if not holds_admin_key(authorization, settings):
        with suppress(Unauthorized):
            if request.app.state.guard.find(authorization) is not None:
                raise Forbidden("the admin key is needed for this: VIT_ADMIN_KEY has it")
        raise Unauthorized("the admin key is wrong" if bearer_token(authorization) else needed)


async def load(service: Service, name: str, settings: Checkpoint) -> tuple[ListedModel, bool]:
    """Load or replace a model; return its status, and whether the name is new.

    Raises `InvalidParameter` if the name is invalid, `NameTaken` if a head has it,
    `EngineUnavailable` or `Draining` if the service is not ready, `UnknownModel` if the model was
    deleted during its load, and errors of `Models.put`.
    """
    models = service.models
    if name != models.name_of(models.default_name):
        check_name(name)
    service.check_ready()
    if name in models.heads:
        raise NameTaken(f"{name}: a head has this name: choose another one for the model")
    key = models.key(name, is_new=True)
    is_new = await models.put(name, settings)
    if key not in models.served:
        raise UnknownModel(f"{name!r}: the model was deleted during its load")
    return models.status_of(key), is_new


async def small_body(request: Request) -> bytearray:
    """Read a body other than a picture; raises `RequestTimeout` and errors of `read_whole`."""
    service = service_of(request)
    service.models.require_ready(service.models.default_name)
    async with admit(request, needs_slot=False) as admitted:
        return await read_whole(admitted, _MAX_BODY)


def checked_settings(document: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the settings of a model in a caller's document.

    Raises:
        InvalidParameter: a setting is unknown, or has a wrong value.
        Forbidden: a path is outside VIT_CHECKPOINT_FOLDER, or that is not set.
        CheckpointRefused: the checkpoint does not exist.
    """
    checked = model_settings(document)
    for name in PATHS:
        value = checked.get(name)
        if value is not None:
            checked[name] = _below(name, value, settings)
    return checked


def _below(name: str, value: object, settings: Settings) -> object:
    """Return the resolved path in a setting, or the value if it is not a path.

    Raises as `checked_settings`.
    """
    if name == "checkpoint" and settings.checkpoint_folder is None:
        raise Forbidden("a checkpoint cannot be named: VIT_CHECKPOINT_FOLDER is not set")
    # Every path is outside the null device.
    folder = Path(settings.checkpoint_folder or os.devnull)
    sent = value
    if name == "checkpoint" and isinstance(value, str):
        value = str(folder / value)  # a hub id or `bundled` is a path too
    try:
        path = located(name, value, folder)
    except Forbidden:
        raise Forbidden(f"{name} {value!r:.200}: is outside VIT_CHECKPOINT_FOLDER") from None
    if path is None:
        return value
    resolved = Path(path).resolve()
    if name == "checkpoint" and not resolved.exists():
        raise CheckpointRefused(
            f"checkpoint {sent!r:.200}: no such file or folder in VIT_CHECKPOINT_FOLDER; "
            "requests may name only what is there"
        )
    return str(resolved)
