"""Routes of taught heads: their examples, their descriptions, and their files.

With keys set, a key teaches the heads that it began. The admin key teaches all heads, and it alone
deletes. Other keys read neither the senders nor the file names and thumbnails of a head's examples.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Final, TypeVar, cast

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from model.label_texts import checked_label
from service.errors import Forbidden, InvalidParameter, NameTaken, NotFound
from service.extensions.teach.errors import HeadWithoutBackbone
from service.extensions.teach.examples import Examples, HeadRow, KeptPicture
from service.extensions.teach.heads import TaughtHeads, features_of
from service.extensions.teach.new_examples import (
    ExampleQuery,
    features_of_head,
    read_features,
)
from service.extensions.teach.settings import TeachSettings
from service.extensions.teach.thumbnail import jpeg_thumbnail
from service.models.folder import check_name
from service.settings import settings_of
from service.web.admit import AdmittedRequest, admit, model_of, service_of
from service.web.api_keys import holds_admin_key
from service.web.body import check_early
from service.web.middleware import request_context
from service.web.query import Absent
from service.web.routes.endpoint import Router
from service.web.routes.openapi import BINARY, SEVERAL_PICTURES, problems
from service.web.routes.shared_answers import to_json
from vitserve.head_documents import (
    AddedExamples,
    ExampleCounts,
    ExampleDocument,
    ExampleList,
    HeadDescription,
    HeadList,
    Knowledge,
)

T = TypeVar("T")

router = Router("teaching")

_FILE: Final = {
    "content": {"application/octet-stream": {"schema": BINARY}},
    "description": "One safetensors file",
}


class LabelQuery(BaseModel, frozen=True):
    """The query of PUT /heads/NAME/examples/N."""

    label: Annotated[str | Absent, Field(description="label of the picture; required")] = None


class PageQuery(BaseModel, frozen=True):
    """The query of GET /heads/NAME/examples."""

    after: Annotated[
        Annotated[int, Field(ge=0)],
        Field(description="list examples with higher numbers: the last number of a page"),
    ] = 0


@router.get(
    "/heads",
    answer=HeadList,
    omit_none=True,
    responses=problems(422, 503, 504),
)
async def list_heads(request: Request) -> HeadList:
    """List the heads that are taught here; GET /models lists all heads that answer."""
    examples = _taught(request).examples
    if examples is None:
        return HeadList(enabled=False, heads=[])
    async with _admitted(request) as admitted:
        heads = await _on_thread(request, admitted, examples.heads)
    return HeadList(
        enabled=True, heads=sorted(heads), thumbnails=_keeps_thumbnails(request) or None
    )


@router.post(
    "/heads/{name}/examples",
    status=201,
    answer=AddedExamples,
    body=SEVERAL_PICTURES | {"required": False},
    responses=problems(400, 403, 404, 408, 409, 413, 415, 422, 500, 503, 504),
)
async def add_examples(request: Request, query: ExampleQuery) -> AddedExamples:
    """Add one or several pictures to a head's examples, under one label.

    The first picture begins the head. All pictures are added, or none. The head is fitted in the
    background, and the previous fit answers until then.
    """
    service = service_of(request)
    examples = _examples(request)
    name = check_name(request.path_params["name"])
    if _is_name_of_model(request, name) or _taught(request).is_file(name):
        raise NameTaken(f"{name}: a model has this name: choose another name for the head")
    if query.label is not None:
        checked_label(query.label)  # refuses a bad query before the request takes a slot
    owner = _owner(request)
    backbone = query.backbone
    async with admit(request) as admitted:
        head = (await _on_thread(request, admitted, examples.heads)).get(name)
        permitted_id = head and head.id
        if head is not None:
            _require_own(request, head)
        if head is not None and backbone is None:
            backbone = service.models.name_of(_taught(request).base(head))
        model = await model_of(request, backbone)
        admitted.model = model
        check_early(request, query, model)
        query, features, pictures = await read_features(request, admitted, query, head)
        info = admitted.model.info
        backbone_and_model = (features_of(info, features_of_head(head, info)), info.name)
        creator = "" if _holds_admin_key(request) else owner or admitted.sender.caller
        label = query.requested(info)

        def add() -> tuple[dict[str, int], list[int]]:
            kept = [KeptPicture(name, jpeg_thumbnail(pixels)) for name, pixels in pictures]
            return examples.add(
                name, label, features, owner, backbone_and_model, permitted_id, creator, kept
            )

        counts, numbers = await _on_thread(request, admitted, add)
    _taught(request).changed()
    return AddedExamples(head=name, examples=counts, numbers=numbers)


@router.get(
    "/heads/{name}/examples",
    answer=ExampleList,
    omit_none=True,
    responses=problems(404, 422, 503, 504),
)
async def list_examples(request: Request, query: PageQuery) -> Response:
    """List the examples of a head, without their features, in pages of 1,000."""

    def write(examples: Examples, head: HeadRow) -> bytes:
        documents = examples.listed(head, query.after)
        if not _is_own(request, head):
            documents = list(map(_without_private_fields, documents))
        return to_json(ExampleList(head=head.name, examples=documents))

    return Response(await _of_head(request, write), media_type="application/json")


@router.get(
    "/heads/{name}/examples/{number:int}",
    answer=ExampleDocument,
    omit_none=True,
    responses=problems(404, 422, 503, 504),
)
async def describe_example(request: Request) -> ExampleDocument:
    """Describe an example of a head, with its thumbnail if VIT_TEACH_THUMBNAILS keeps one."""
    number = request.path_params["number"]

    def describe(examples: Examples, head: HeadRow) -> ExampleDocument:
        document = examples.example(head, number)
        return document if _is_own(request, head) else _without_private_fields(document)

    return await _of_head(request, describe)


def _without_private_fields(example: ExampleDocument) -> ExampleDocument:
    """Return an example as keys without rights to its head may read it."""
    return ExampleDocument(number=example.number, label=example.label, time=example.time)


@router.put(
    "/heads/{name}/examples/{number:int}",
    answer=ExampleCounts,
    responses=problems(403, 404, 409, 422, 503, 504),
)
async def relabel_example(request: Request, query: LabelQuery) -> ExampleCounts:
    """Put an example of a head under another label, and fit the head again."""
    if query.label is None:
        raise InvalidParameter("label: missing: send ?label=cat; this route reads no form")
    label = checked_label(query.label)
    if "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0":
        raise InvalidParameter("a body has no effect here: POST to the head's examples adds one")

    def change(examples: Examples, head: HeadRow) -> ExampleCounts:
        _require_own(request, head)
        counts = examples.relabel(head, request.path_params["number"], label)
        return ExampleCounts(head=head.name, examples=counts)

    counts = await _of_head(request, change)
    _taught(request).changed()
    return counts


@router.delete(
    "/heads/{name}/examples/{number:int}",
    answer=ExampleCounts,
    responses=problems(403, 404, 422, 503, 504),
)
async def delete_example(request: Request) -> ExampleCounts:
    """Remove an example of a head, and fit the head again."""
    _require_admin(request)

    def remove(examples: Examples, head: HeadRow) -> ExampleCounts:
        counts = examples.remove(head, request.path_params["number"])
        return ExampleCounts(head=head.name, examples=counts)

    counts = await _of_head(request, remove)
    _taught(request).changed()
    return counts


@router.get(
    "/heads/{name}",
    answer=HeadDescription,
    omit_none=True,
    responses=problems(404, 422, 503, 504),
)
async def describe_head(request: Request) -> HeadDescription:
    """Describe a head: its examples, its accuracy, its confusions, and doubtful labels."""
    examples = _examples(request)
    name = request.path_params["name"]
    async with _admitted(request) as admitted:
        await _taught(request).look()  # the description is then of the head that answers here
        taught = _taught(request).heads.get(name)
        if taught is None or not taught.row.id:
            raise NotFound(f"{name}: there is no such head")
        head = taught.row
        counts, _ = await _on_thread(request, admitted, partial(examples.state, head))
    reason = taught.problem or head.reason
    knowledge = Knowledge()
    try:
        if taught.fitted is not None:
            knowledge = Knowledge.model_validate_json(taught.fitted.statistics)
        _taught(request).base(head)
    except ValidationError:
        reason = "its statistics are damaged: add or remove an example to fit it again"
    except HeadWithoutBackbone as error:
        reason = str(error)
    if _is_name_of_model(request, name):
        reason = "a model has this name, and answers instead"
    return HeadDescription(
        head=name,
        examples=counts,
        backbone=head.backbone,
        model=head.model,
        reason=reason or None,
        up_to_date=head.fitted_revision == head.revision,
        **dict(knowledge),
    )


@router.delete(
    "/heads/{name}",
    status=204,
    responses=problems(403, 404, 422, 503, 504),
)
async def delete_head(request: Request) -> Response:
    """Remove a head with all its examples; admitted requests are still answered."""
    _require_admin(request)
    await _of_head(request, lambda examples, head: examples.remove(head))
    _taught(request).changed()
    return Response(status_code=204)


@router.get(
    "/heads/{name}/export",
    responses={200: _FILE, **problems(404, 422, 503, 504)},
)
async def export_head(request: Request) -> Response:
    """Return a head as one file, for a folder of models that has its backbone."""
    name = request.path_params["name"]
    _, content = await _of_head(request, lambda examples, head: examples.state(head))
    if content is None:
        raise NotFound(f"{name}: not fitted yet: GET /heads/{name} says why")
    file_name = f'attachment; filename="{name}.safetensors"'
    return Response(
        content, headers={"Content-Disposition": file_name}, media_type="application/octet-stream"
    )


async def _of_head(request: Request, work: Callable[[Examples, HeadRow], T]) -> T:
    """Admit a request, and run work on the head that its path names; raises `NotFound`."""
    examples = _examples(request)
    name = request.path_params["name"]
    async with _admitted(request) as admitted:
        return await _on_thread(request, admitted, lambda: work(examples, examples.head(name)))


@asynccontextmanager
async def _admitted(request: Request) -> AsyncIterator[AdmittedRequest]:
    """Admit a request without a model; it holds a slot until its answer is written.

    A disconnect frees the slot, too.
    """
    async with admit(request) as admitted:
        await admitted.take_slots(1)
        yield admitted


async def _on_thread(request: Request, admitted: AdmittedRequest, work: Callable[[], T]) -> T:
    """Run work on the examples on a thread, and return its result."""
    return await admitted.on_thread(request.app.state.examples_lane, work)


def _is_name_of_model(request: Request, name: str) -> bool:
    """Return whether a model other than a head has this name."""
    models = service_of(request).models
    return name in map(models.name_of, models.served)


def _taught(request: Request) -> TaughtHeads:
    return cast(TaughtHeads, request.app.state.taught)


def _keeps_thumbnails(request: Request) -> bool:
    return settings_of(service_of(request).settings, TeachSettings).teach_thumbnails


def _examples(request: Request) -> Examples:
    """Return the service's examples; raises `NotFound` without VIT_TEACH."""
    examples = _taught(request).examples
    if examples is None:
        raise NotFound("nothing is taught here: the service was started without VIT_TEACH")
    return examples


def _require_own(request: Request, head: HeadRow) -> None:
    """Raise `Forbidden` if keys are set and the request lacks the head's and the admin key."""
    if not _is_own(request, head):
        _require_admin(request)


def _is_own(request: Request, head: HeadRow) -> bool:
    """Return whether a request has the head's or the admin key, or no keys are set."""
    if not service_of(request).settings.api_keys or _holds_admin_key(request):
        return True
    return head.owner == _owner(request)


def _owner(request: Request) -> str:
    """Return the owner that heads store for a request; empty without keys or for the admin key."""
    return _examples(request).database.owner_of(request_context(request.scope).key_owner or "")


def _require_admin(request: Request) -> None:
    """Raise `Forbidden` unless the request has the admin key, or no keys are set."""
    settings = service_of(request).settings
    is_open = not settings.api_keys and settings.admin_key is None
    if not (is_open or _holds_admin_key(request)):
        raise Forbidden("the admin key is needed for this: VIT_ADMIN_KEY has it")


def _holds_admin_key(request: Request) -> bool:
    return holds_admin_key(request.headers.get("authorization", ""), service_of(request).settings)
