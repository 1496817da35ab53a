"""The routes that an unknown path or method was probably meant for."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Final

from model.errors import nearest

_MAX_COMPARED_CHARACTERS: Final = 100

_OTHER_NAMES: Final = {
    "predict": "/classify",
    "prediction": "/classify",
    "infer": "/classify",
    "inference": "/classify",
    "upload": "/classify",
    "batch": "/classify/batch",
    "regress": "/classify",
    "score": "/classify",
    "explanations": "/attention",
    "info": "/model",
    "version": "/model",
    "explain": "/attention",
    "heatmap": "/attention",
    "features": "/embed",
    "metadata": "/model",
    "health": "/healthz",
    "live": "/healthz",
    "livez": "/healthz",
    "ready": "/readyz",
    "classes": "/labels",
    "swagger": "/docs",
    "redoc": "/docs",
}
"""Our routes by their names in other servers."""

OTHER_METHODS: Final = {("POST", "/models"): "PUT /models/NAME loads a model"}
"""Remedies for methods that other servers have on a path of ours."""

_OF_A_MODEL: Final = frozenset({"/classify", "/attention", "/embed", "/model", "/labels"})
"""Routes whose parameter `model` names one."""

_MOST_ROUTES: Final = 10
_LEAST_SHARED: Final = 2

Routes = Mapping[str, Collection[str]]
"""The methods of each path; parameters of paths are in braces."""


def no_such_path(method: str, path: str, known: Routes) -> str:
    """Return the remedy for an unknown path.

    The path may have a prefix, other letter case and extra slashes (`/api/v1/classify/`). It may be
    a route's name in another server, or similar to the path of a route.
    """
    near = _nearest_by_name(method, path, known)
    meant = [near] if near else []
    meant += _nearest_by_structure(method, path, known)
    if not meant:
        near = nearest("/" + "/".join(_parts(path.lower())), known)
        meant = [_with_method(method, near, known)] if near else []
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    first = _parts(path)[:1]
    below = sorted((route for route in known if _parts(route)[:1] == first), key=len)
    return f"there are {', '.join(below[:_MOST_ROUTES])}" if below else "GET /docs lists all"


def no_such_method(method: str, path: str, allowed: Collection[str], known: Routes) -> str:
    """Return the remedy for a method that a path does not have."""
    if (method, path) in OTHER_METHODS:
        return OTHER_METHODS[method, path]
    meant = _nearest_by_structure(method, path, known)
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return f"there are {', '.join(sorted(allowed))}{hint}"


def _nearest_by_name(method: str, path: str, known: Routes) -> str:
    """Return the route that the end of a path names, or an empty text.

    The name of a model may follow: `/models/NAME:predict`, `/explanations/NAME`.
    """
    parts = _parts(path)
    names = [part.lower() for part in parts]
    tails = ("/".join(names[start:]) for start in range(len(names)))
    route = next(filter(None, (_called(tail, known) for tail in tails)), "")
    models = [model for before, model in pairwise(parts) if before == "models"]
    if not route and len(parts) > 1:
        route = _called(names[-2], known)
        models = models or parts[-1:]
        if names[-2] == "models":
            route = "/model" if method in ("GET", "HEAD") else "/classify"
        if route not in _OF_A_MODEL:
            return ""
    if not route:
        return ""
    hint = _with_method(method, route, known)
    return f"{hint}?model={models[0]}" if models and route in _OF_A_MODEL else hint


def _called(name: str, known: Routes) -> str:
    """Return the route with a name, here or in other servers, or an empty text."""
    return f"/{name}" if f"/{name}" in known else _OTHER_NAMES.get(name, "")


def _with_method(method: str, route: str, known: Routes) -> str:
    """Return a route with the method of the request, or with one that it has."""
    methods = known[route]
    return f"{method if method in methods else min(methods)} {route}"


def _nearest_by_structure(method: str, path: str, known: Routes) -> list[str]:
    """Return the routes of a method that share most leading parts with a path; the shortest ones.

    They share at least two parts. A leading version does not count: `/v1/models/NAME` is like
    `/models/NAME`.
    """
    parts = _parts(path)
    parts = parts[_version_parts(parts) :]
    near: dict[int, list[list[str]]] = {}
    for route, methods in known.items():
        if method not in methods:
            continue
        route_parts = _parts(route)
        start = _version_parts(route_parts)
        pairs = zip(parts, route_parts[start:], strict=False)
        shared = list(takewhile(lambda pair: pair[1] in (pair[0], "{name}", "{version}"), pairs))
        route_parts[start : start + len(shared)] = [part for part, _ in shared]
        near.setdefault(len(shared), []).append(route_parts)
    most = max(near, default=0)
    if most < _LEAST_SHARED:
        return []
    length = min(map(len, near[most]))
    return [f"{method} /{'/'.join(route)}" for route in near[most] if len(route) == length]


def _parts(path: str) -> list[str]:
    return [part for part in re.split("[/:]", path[:_MAX_COMPARED_CHARACTERS]) if part]


def _version_parts(parts: Sequence[str]) -> int:
    """Return how many parts at the beginning of a path are a version, 0 or 1."""
    return int(bool(parts) and re.fullmatch(r"v\d", parts[0]) is not None)
