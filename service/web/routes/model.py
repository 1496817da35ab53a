"""Routes that describe a model: /model, /labels."""

import asyncio
import logging
from importlib.metadata import version
from typing import Annotated, Final
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import Field
from starlette.requests import Request

from model.config import LibraryConfig, ViTConfig
from model.outputs import MapRequest, RequestedOutputs
from model.parameters import methods_of
from service.background import Tasks
from service.engine.interface import Engine
from service.engine.messages import InferenceRequest, attributes
from service.errors import ServiceError
from service.models.version import Version
from service.web.admit import model_of
from service.web.query import ModelQuery
from service.web.routes.endpoint import Router
from service.web.routes.openapi import problems
from vitserve.documents import Labels, ModelDescription

logger = logging.getLogger("vitserve")

_PREPARE_SECONDS: Final = 60.0
"""Longest wait until the map that prepares the others begins."""

_preparing = Tasks()
_prepared: WeakKeyDictionary[Version[Engine], asyncio.Task[None] | None] = WeakKeyDictionary()


class DescribedQuery(ModelQuery, frozen=True):
    """The query of GET /model."""

    prepare_maps: Annotated[
        bool, Field(description="compile explanations now, which would delay the first map")
    ] = False


router = Router("models")


@router.get("/model", answer=ModelDescription, responses=problems(404, 422, 503))
async def model(request: Request, query: DescribedQuery) -> ModelDescription:
    """Describe a served model."""
    current = await model_of(request, query.model)
    if query.prepare_maps:
        _prepare_maps(current.version)
    info = current.info
    config = info.config
    facts = attributes(ModelDescription.model_fields, info, config, current.engine.status)
    if not current.is_loaded:
        facts["compiled"] = "unloaded"
    if isinstance(config, LibraryConfig):
        facts |= {"runtime": config.library, "runtime_version": version(config.library)}
    return ModelDescription(
        **facts,
        input_size=config.image_size,
        channels=config.in_channels,
        layers=config.depth if isinstance(config, ViTConfig) else None,
        classes=config.num_classes,
        preprocessing=info.preprocess.model_dump(mode="json"),
        attention_methods=list(methods_of(config)),
        score_form=info.form.model_dump(),
        templates=info.zero_shot and list(info.zero_shot.templates),
    )


def _prepare_maps(version: Version[Engine]) -> None:
    """Compute the map of an empty picture in the background, once for each version of a model."""
    info = version.engine.info
    if info is None or not version.engine.ready or version in _prepared:
        return
    _prepared[version] = None
    if "relevance" in methods_of(info.config):
        requested = RequestedOutputs(1, MapRequest("relevance"))
        picture = InferenceRequest(np.zeros(info.input_shape, np.uint8), requested)
        _prepared[version] = _preparing.begin(_compute(version, picture))


async def _compute(version: Version[Engine], picture: InferenceRequest) -> None:
    """Compute a picture, and discard the answer."""
    version.hold()
    try:
        await version.engine.infer(picture, timeout=_PREPARE_SECONDS)
    except ServiceError as error:
        logger.info("the first map will take longer: %s", error)
    finally:
        version.release()


@router.get("/labels", answer=Labels, responses=problems(404, 422, 503))
async def labels(request: Request, query: ModelQuery) -> Labels:
    """Return the classes in index order."""
    info = (await model_of(request, query.model)).info
    return Labels(model=info.name, labels=list(info.labels))
