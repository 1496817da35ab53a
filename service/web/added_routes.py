"""The routes that extensions add, checked to leave the routes of other parts alone."""

import re
from collections.abc import Mapping

from model.errors import ExtensionError
from model.extension import CORE
from service.extension import Routes, extensions, naming
from service.web.routes.endpoint import Application, Endpoint


def with_added_routes(core: Routes, app: Application) -> list[Routes]:
    """Return the routes of the core and of each extension.

    Raises:
        ExtensionError: the routes of an extension cannot be made, another route answers instead of
            one of them, or a rule applies to the routes of another part.
    """
    parts = {CORE: core}
    for extension in extensions():
        if extension.routes is None:
            continue
        with naming(extension, "routes"):
            added = extension.routes(app)
            if not isinstance(added, Routes):
                raise TypeError(f"{added!r} is not a `service.extension.Routes`")
            owner = f"the extension {extension.name!r}"
            _require_reached(added, owner, parts)
            _require_own_paths(added, owner, parts)
        parts[owner] = added
    return list(parts.values())


def _require_reached(added: Routes, owner: str, parts: Mapping[str, Routes]) -> None:
    """Raise `ExtensionError` if an earlier route answers all requests to one of these routes."""
    for number, endpoint in enumerate(added.routes):
        earlier = {**parts, owner: Routes(added.routes[:number])}
        for other_owner, part in earlier.items():
            for other in part.routes:
                methods = endpoint.methods & other.methods
                if methods and other.match(_example(endpoint)) is not None:
                    raise ExtensionError(
                        f"{owner}: the route {min(methods)} {endpoint.path_format} also belongs "
                        f"to {other_owner} ({other.path_format}): rename it, or uninstall the "
                        "extension"
                    )


def _require_own_paths(added: Routes, owner: str, parts: Mapping[str, Routes]) -> None:
    """Raise `ExtensionError` if a rule for paths applies to a route of another part."""
    paths = added.public | added.probes
    prefixes = (*added.accepts_admin, *added.problem_answers)
    for other_owner, part in parts.items():
        for endpoint in part.routes:
            path = _example(endpoint)
            needs_admin = any(
                re.fullmatch(added.admin, f"{method} {path}") for method in endpoint.methods
            )
            if path in paths or f"{path}/".startswith(prefixes) or needs_admin:
                raise ExtensionError(
                    f"{owner}: its rules for paths apply to {endpoint.path_format}, which belongs "
                    f"to {other_owner}: name only its own paths, or uninstall the extension"
                )


def _example(endpoint: Endpoint) -> str:
    """Return a path that the endpoint answers."""
    values = {
        name: "x" if kind == "string" else "1"
        for name, kind in endpoint.operation.path_types.items()
    }
    return endpoint.path_format.format(**values)
