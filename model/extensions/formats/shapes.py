"""Shapes of tensors, which tell the sizes of a network."""

from collections.abc import Mapping

from torch import Tensor

from model.errors import CheckpointError


def shape_of(
    tensors: Mapping[str, Tensor], name: str, where: str, *dimensions: int
) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Raises:
        CheckpointError: missing, empty, or of another number of dimensions.
    """
    if name not in tensors:
        raise CheckpointError(
            f"{where}: missing key {name!r}: save all of model.state_dict() under its own names"
        )
    shape = tuple(tensors[name].shape)
    if len(shape) not in dimensions or 0 in shape:
        wanted = " or ".join(map(str, dimensions))
        raise CheckpointError(
            f"{where}: {name} has shape {list(shape)}, expected {wanted} dimensions that are not "
            "empty: reshape it where it was made, and save the file again"
        )
    return shape
