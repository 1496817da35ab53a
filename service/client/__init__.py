"""A client of the service, blocking and asynchronous, on httpx.

with Client("http://127.0.0.1:8000") as client:
    print(client.classify("photo.jpg").predictions[0].label)
"""

from __future__ import annotations

from service.client.asynchronous import AsyncClient
from service.client.blocking import Client
from service.client.errors import (
    ClientError,
    DeadlineExceeded,
    ForeignAnswer,
    ImageRefused,
    InferenceFailed,
    InvalidParameter,
    NotFound,
    ProblemError,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from service.client.requests import DrawingOptions, ImageSource, MapOptions
from service.client.retries import Retries

__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "DeadlineExceeded",
    "DrawingOptions",
    "ForeignAnswer",
    "ImageRefused",
    "ImageSource",
    "InferenceFailed",
    "InvalidParameter",
    "MapOptions",
    "NotFound",
    "ProblemError",
    "Retries",
    "Unauthorized",
    "Unavailable",
    "Unreachable",
]
