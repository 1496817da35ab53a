"""A name that is served, and its current version."""

import time
from typing import Literal

from service.engine.interface import Engine
from service.engine.messages import ModelInfo
from service.models.version import Version
from vitserve.documents import ListedModel

# The states in which a name is listed.
ModelState = Literal["ready", "loading", "unloaded", "failed"]


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

    @property
    def info(self) -> ModelInfo | None:
        """Return the description of the current version, or of the last one that was loaded."""
        self._info = self.current.engine.info or self._info
        return self._info

    @property
    def state(self) -> ModelState:
        """Return the state in which the name is listed."""
        match self.current.state:
            case "retiring" | "closed":  # the service stops
                return "ready" if self.current.engine.ready else "loading"
            case "unloaded" if self.is_being_replaced:
                return "loading"
            case state:
                return state

    @property
    def size(self) -> int:
        """Return the measured bytes of its backbone; 0 if they are unknown."""
        return 0

    @property
    def last_used(self) -> float | None:
        """Return monotonic seconds of its last image, None before the first or if unknown."""
        return None

    def listed(self, name: str, *, is_default: bool) -> ListedModel:
        """Return the name's entry in the list of models."""
        info = self.info
        reason = ""
        if self.current.state == "unloaded":
            reason = "its memory was given back"
        elif self.state != "ready":
            reason = self.current.engine.status.reason
        last_used_seconds = None
        if self.last_used is not None:
            last_used_seconds = round(time.monotonic() - self.last_used, 3)
        return ListedModel(
            name=name,
            state=self.state,
            reason=reason,
            backbone="" if info is None else info.backbone,
            classes=None if info is None else info.config.num_classes,
            bytes=self.size if self.state == "ready" else 0,
            last_used_seconds=last_used_seconds,
            default=is_default,
            taught=False,
        )
