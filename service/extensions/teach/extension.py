"""Add heads that learn from labelled pictures: VIT_TEACH, /heads, `vitserve teach`."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from service.extension import Command, Extension, Routes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from service.settings import Settings
    from service.web.routes.endpoint import Application

# Longest wait of a starting process for the heads, which may be on a network's disk.
_FIRST_LOOK_SECONDS = 10.0
# Threads that read and write examples: one goes on reading while the other waits for a process that
# writes.
_EXAMPLE_THREADS = 2


def _routes(app: Application) -> Routes:
    from service.extensions.teach.examples import Examples
    from service.extensions.teach.heads import TaughtHeads
    from service.extensions.teach.routes import router
    from service.extensions.teach.settings import TeachSettings
    from service.settings import settings_of
    from service.web.lanes import Lane

    service = app.state.service
    folder = settings_of(service.settings, TeachSettings).teach
    models_folder = service.settings.models
    app.state.taught = TaughtHeads(
        None if folder is None else Examples(Path(folder).expanduser()),
        None if models_folder is None else Path(models_folder).expanduser(),
        service.models,
    )
    app.state.examples_lane = Lane("examples", threads=_EXAMPLE_THREADS, clock=service.clock)
    app.state.on_models_changed.append(app.state.taught.renew)
    return Routes(router.routes, accepts_admin=("/heads/",))


@asynccontextmanager
async def _beside(app: Application) -> AsyncIterator[None]:
    """Read the heads before the first request, and after changes."""
    import asyncio
    from contextlib import suppress

    from service.background import keep_running

    watching = keep_running("taught-heads", app.state.taught.watch)
    with suppress(TimeoutError):
        await asyncio.wait_for(app.state.taught.has_looked.wait(), _FIRST_LOOK_SECONDS)
    yield
    watching.cancel()
    app.state.examples_lane.close()


def _check(settings: Settings) -> None:
    import logging

    from service.extensions.teach.settings import TeachSettings
    from service.settings import settings_of

    teach = settings_of(settings, TeachSettings)
    if teach.teach_thumbnails and teach.teach is None:
        logging.getLogger("vitserve").warning(
            "VIT_TEACH_THUMBNAILS has no effect without VIT_TEACH"
        )


def _reads_transfer_features(settings: Settings) -> bool:
    from service.extensions.teach.settings import TeachSettings
    from service.settings import settings_of

    return settings_of(settings, TeachSettings).teach is not None


EXTENSION = Extension(
    name="teach",
    settings="service.extensions.teach.settings:TeachSettings",
    notes={"admin_key": "DELETE /heads/NAME"},
    page=Path(__file__).parent / "page",
    commands={
        "teach": Command(
            "service.extensions.teach.command",
            "make a head from a folder of pictures for each label, here or in a server",
            example="vitserve teach pets photos/",
        )
    },
    check=_check,
    routes=_routes,
    beside=_beside,
    reads_transfer_features=_reads_transfer_features,
)
