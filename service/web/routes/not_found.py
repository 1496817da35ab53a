"""The route that an unknown path or method was probably meant for."""

import re
from collections.abc import Collection
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
    "explain": "/attention",
    "heatmap": "/attention",
    "features": "/embed",
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
"""Remedies for requests of other servers whose path is one of ours."""


def nearest_path(path: str, known: Collection[str]) -> str:
    """Return the path of the route that was probably meant, or an empty text.

    The unknown path may have a prefix, other letter case and extra slashes (`/api/v1/classify/`).
    It may be a route's name in another server, or similar to the path of a route.
    """
    parts = [part for part in re.split("[/:]", path[:_MAX_COMPARED_CHARACTERS].lower()) if part]
    for start in range(len(parts)):
        tail = "/".join(parts[start:])
        if f"/{tail}" in known:
            return f"/{tail}"
        if tail in _OTHER_NAMES:
            return _OTHER_NAMES[tail]
    return nearest("/" + "/".join(parts), known)
