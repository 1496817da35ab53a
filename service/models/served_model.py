"""A name that is served, and its current version."""

from service.background import Tasks
from service.engine.base import Engine
from service.engine.messages import ModelInfo
from service.models.states import ModelState
from service.models.version import Version


class ServedModel:
    """A name that is served.

    Attributes:
        current: the version that new requests belong to.
        is_being_replaced: whether another version is being loaded in place of an unloaded one, and
            new requests wait for that version.
    """

    current: Version[Engine]
    is_being_replaced = False
    _info: ModelInfo | None = None

    def __init__(self) -> None:
        self._tasks = Tasks()

    @property
    def info(self) -> ModelInfo | None:
        """Return the description of the current version, or of the last one that was loaded."""
        self._info = self.current.engine.info or self._info
        return self._info

    @property
    def state(self) -> ModelState:
        """Return the state in which the name is listed."""
        match self.current.state:
            case "leaving" | "gone":  # the service stops
                return "ready" if self.current.engine.ready else "loading"
            case "unloaded" if self.is_being_replaced:
                return "loading"
            case state:
                return state
