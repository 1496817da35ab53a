"""The seam between the core of the service and its extensions.

    [project.entry-points."vitserve.extensions"]
    audit = "audit_log:EXTENSION"

An extension is an object of `Extension` that a package names as an entry point. The core asks each
extension through the fields below and imports none. docs/extensions.md has a complete example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from model import extension as model_extension
from model.errors import VitError
from model.extension import claim
from model.extension import extensions as installed
from service.errors import ServiceError

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from service.engine.backbones import Loader
    from service.observe.metrics import Metrics
    from service.settings import Settings
    from service.web.image_stores import ImageStore
    from service.web.problems import Problem
    from service.web.routes.endpoint import Application, Endpoint


class Command(NamedTuple):
    """A subcommand of `vitserve`.

    Attributes:
        module: dotted name of a module with `add_arguments(parser)` and `run(arguments) -> int`.
        summary: line in `vitserve --help`.
        example: complete command line, shown when an argument is missing.
        synonyms: other words that suggest this subcommand.
    """

    module: str
    summary: str
    example: str = ""
    synonyms: Sequence[str] = ()


class Routes(NamedTuple):
    """Routes of an extension, and how the layers around them treat their paths.

    Attributes:
        routes: endpoints of a `service.web.routes.endpoint.Router`, matched after the core's.
        public: paths that need no API key.
        probes: paths that machines poll. Their requests are logged only for debugging, are not
            counted in flight, and their 503 is not counted as a refusal.
        admin: regular expression for whole strings "METHOD path". Matching requests need the admin
            key instead of an API key; the route itself checks it.
        accepts_admin: path prefixes, such as "/audits/", that take the admin key as well.
        problem_answers: functions by path prefix that write errors in another form than RFC 9457.
    """

    routes: Sequence[Endpoint]
    public: frozenset[str] = frozenset()
    probes: frozenset[str] = frozenset()
    admin: str = ""
    accepts_admin: Sequence[str] = ()
    problem_answers: Mapping[str, Callable[[Problem], Response]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Extension(model_extension.Extension):
    """The additions of one extension; every field but `name` is optional.

    Importing the object must be cheap, because `vitserve --help` does it. Therefore its functions
    import their modules when they are called.

    Functions that take the application find the shared objects in `app.state`, see
    `service.web.service.ApplicationState`.

    Attributes:
        settings: `module:Class` of a pydantic model whose fields join the settings as `VIT_NAME`.
        notes: additions to the descriptions of the core's settings, by the setting's name.
        commands: subcommands by name.
        check: called at the start with the settings; raises `SettingsError` to end it.
        prepared: context around the whole service, entered once before any process starts; it
            returns the settings that the service runs with.
        serve: runs several processes until a signal ends them, and returns the exit code; the
            arguments are the settings and the loader of predictors.
        routes: returns routes, and may put their shared objects into `app.state`.
        around: returns the application inside middleware. It sees requests before their key and
            origin are checked; only the request log and the answers to errors are outside it.
        beside: context around the running application, entered in each web process before
            requests are accepted.
        page: folder with `main.js` and `main.css`, which the page at / loads, and further files;
            served below /page/NAME/. See `service/web/page/moments.js`.
        stores: image stores by the scheme of VIT_RECENT_URL; the arguments are the settings, the
            metrics and a monotonic clock in seconds.
        reads_transfer_features: whether models have to compute transfer features.
    """

    settings: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, Command] = field(default_factory=dict)
    check: Callable[[Settings], None] | None = None
    prepared: Callable[[Settings], AbstractContextManager[Settings]] | None = None
    serve: Callable[[Settings, Loader], int] | None = None
    routes: Callable[[Application], Routes] | None = None
    around: Callable[[ASGIApp, Application], ASGIApp] | None = None
    beside: Callable[[Application], AbstractAsyncContextManager[None]] | None = None
    page: Path | None = None
    stores: Mapping[str, Callable[[Settings, Metrics, Callable[[], float]], ImageStore]] = field(
        default_factory=dict
    )
    reads_transfer_features: Callable[[Settings], bool] | None = None


def check(settings: Settings) -> None:
    """Call each extension's check of the settings.

    Raises:
        ExtensionError: an extension's check failed.
        SettingsError: an extension refuses the settings.
    """
    for extension in extensions():
        if extension.check is not None:
            with naming(extension, "check"):
                extension.check(settings)


def extensions_by_scheme() -> dict[str, Extension]:
    """Return the extension with the image store for each scheme of VIT_RECENT_URL.

    Raises:
        ExtensionError: two extensions have stores for one scheme.
    """
    by_scheme: dict[str, Extension] = {}
    owners: dict[str, str] = {}
    for extension in extensions():
        claim(extension.stores, "the scheme of VIT_RECENT_URL", extension, owners)
        by_scheme |= dict.fromkeys(extension.stores, extension)
    return by_scheme


def naming(extension: Extension, field_name: str) -> AbstractContextManager[None]:
    """Name the extension and the failed line in an unexpected error of one of its functions.

    Raises:
        ExtensionError: the function raised an error other than vitserve's own.
    """
    return model_extension.naming(extension, field_name, (VitError, ServiceError))


def extensions() -> tuple[Extension, ...]:
    """Return the installed extensions of the service, sorted by name; raises `ExtensionError`."""
    return tuple(extension for extension in installed() if isinstance(extension, Extension))
