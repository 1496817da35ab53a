"""The checkpoints by which the operator has replaced configured ones."""

from typing import NamedTuple

from service.engine.backbones import Checkpoint


class Override(NamedTuple):
    """A model that is served, or was deleted, in place of the configured one.

    Attributes:
        number: number of its version, see `service.models.version.Version`.
        checkpoint: the loaded checkpoint, see `Models.put`; None for the configured one.
        is_deleted: whether the model was deleted.
    """

    number: int = 1
    checkpoint: Checkpoint = None
    is_deleted: bool = False
