"""Answers of a service, for tests without a service."""

from typing import Any

URL = "http://service"

CAT: dict[str, Any] = {
    "model": "tiny",
    "predictions": [{"label": "cat", "index": 3, "score": 0.5}],
    "timings_ms": {"decode": 1.0, "queue": 0.0, "inference": 2.0, "total": 3.0},
    "batch_size": 1,
}
"""Return an answer of POST /classify."""

PNG = b"\x89PNG\r\n\x1a\n"
"""The beginning of a PNG, an answer of GET /attention."""

FULL: dict[str, Any] = {
    "type": "about:blank",
    "title": "Queue full",
    "status": 503,
    "detail": "no slot is free",
    "code": "queue_full",
    "request_id": "r",
}
"""Return a problem document."""

MAP: dict[str, Any] = {
    "method": "cls",
    "layer": 2,
    "head": "max",
    "grid": [1, 2],
    "values": [[0.25, 0.75]],
    "kept_mass": 0.5,
    "region": {"x": 0, "y": 0, "width": 2, "height": 1},
}
"""Return an answer of POST /attention with `format=json`."""

SIDE = 64
"""Longer side of the input of `MODEL`'s model."""

MODEL: dict[str, Any] = {
    "name": "tiny",
    "source": "",
    "revision": None,
    "format": "",
    "architecture": "",
    "parameters": 1,
    "width": 1,
    "input_size": [56, 56],
    "channels": 3,
    "classes": 10,
    "temperature": 1.0,
    "multi_label": False,
    "device": "cpu",
    "dtype": "float32",
    "backend": "",
    "compiled": "",
    "max_batch": 1,
    "batch_sizes": None,
    "preprocessing": {"resize_size": [SIDE, SIDE]},
    "attention_methods": [],
}
"""Return an answer of GET /model."""
