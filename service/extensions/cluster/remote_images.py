"""The image store of a web worker: an engine process keeps the pictures."""

from model.images.preprocess import ModelInput
from service.errors import EngineUnavailable
from service.extensions.cluster import frames
from service.extensions.cluster.engine_client import EngineClient
from service.web.image_stores import StoreUsage


class RemoteImageStore:
    """Keeps the pictures of all workers in one engine process; see `MemoryImageStore`."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def put(self, picture: ModelInput, image_id: str) -> bool:
        """Keep a picture; return whether it is kept, false if the engine has ended."""
        try:
            pixels = self._engine.put(picture.pixels)
            return bool(await self._engine.ask(frames.Put(pixels, picture.region, image_id)))
        except EngineUnavailable:
            return False

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture; None if it is not kept (any more), or the engine has ended."""
        try:
            picture: ModelInput | None = await self._engine.ask(frames.Get(image_id))
            return picture
        except EngineUnavailable:
            return None

    def usage(self) -> StoreUsage:
        """Return the usage that the engine published last."""
        return self._engine.published.kept

    async def close(self) -> None:
        """Do nothing: the memory belongs to the engine process."""
