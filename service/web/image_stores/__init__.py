"""Where pictures are stored for GET /attention: the model's inputs, never the uploads."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from model.images.preprocess import ModelInput


class StoreUsage(NamedTuple):
    """The pictures that a store holds, their bytes, and how many were pushed out before their time, since the start."""

    pictures: int = 0
    size: int = 0
    evicted: int = 0


class ImageStore(Protocol):
    """Stores pictures, each with its region of the original, under unguessable ids."""

    async def put(self, picture: ModelInput) -> str | None:
        """Store a picture, and return its id, 128 bits of the system's randomness, or None if it is not stored."""

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture, or None if it is unknown, expired or pushed out."""

    def usage(self) -> StoreUsage:
        """Return what is stored now."""

    async def close(self) -> None:
        """Close the connections."""
