"""Where pictures are kept for GET /attention: the model's inputs, never the uploads."""

from typing import Protocol

from model.images.preprocess import ModelInput
from service.web.image_stores.memory import StoreUsage


class KeptPictures(Protocol):
    """The store of kept pictures, wherever they lie."""

    async def put(self, picture: ModelInput) -> str | None:
        """Keep a picture, and return its id, or None if nothing is kept."""

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture, or None if it is unknown, expired or pushed out."""

    def usage(self) -> StoreUsage:
        """Return the pictures that are kept now."""

    async def close(self) -> None:
        """Release connections."""
