"""The client of the service, its errors, and the types of its answers."""

from __future__ import annotations

from service.client import AsyncClient, Client, ClientError, ImageSource, ProblemError
from service.schemas import (
    Attention,
    BatchClassification,
    Classification,
    FailedItem,
    ModelDescription,
    Prediction,
    ProblemDocument,
    Timings,
)

__all__ = [
    "AsyncClient",
    "Attention",
    "BatchClassification",
    "Classification",
    "Client",
    "ClientError",
    "FailedItem",
    "ImageSource",
    "ModelDescription",
    "Prediction",
    "ProblemDocument",
    "ProblemError",
    "Timings",
]
