"""Everything that can go wrong below the server, as types.

The tree:

    VitError
      ImageError                 this picture cannot be used; its sender's fault
        UnsupportedImageFormat     not the magic of an allowed format
        ImageTooLarge              more pixels than the limit allows
        InvalidImage               an allowed format that does not decode
      CheckpointError            a checkpoint that cannot be read exactly as it was written
      DeviceError                a device or dtype that this machine does not have
      FigureError                a picture of numbers that cannot be drawn or written
      InputError                 a parameter outside what the model offers (layer, head, method)
      TrainingError              data or a recipe that cannot be trained on
        DatasetError

Errors know neither HTTP nor exit codes: `service.web.app` and `service.__main__` map them.
Each message is one line that names the thing and, where there is one, the way out.
"""

from __future__ import annotations

from typing import Any


class VitError(Exception):
    """Root of all errors that vitserve raises on purpose."""


class ImageError(VitError):
    """A picture that cannot be classified. Costs its sender an error, nobody else anything."""


class UnsupportedImageFormat(ImageError):
    """The bytes do not start with the magic of an allowed format."""


class ImageTooLarge(ImageError):
    """The picture has more pixels than the limit allows; raised before they are allocated."""


class InvalidImage(ImageError):
    """An allowed format whose data are truncated, corrupt or empty."""


class CheckpointError(VitError):
    """A checkpoint that is missing, incomplete, or not what its config says. Names file and thing."""


class DeviceError(VitError):
    """The asked-for device or dtype is not available here."""


class FigureError(VitError):
    """matplotlib is not installed, or the figure's file cannot be written."""


class InputError(VitError):
    """A parameter outside what the loaded model offers.

    Attributes:
        parameter: name of the offending parameter, as the caller spells it.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class TrainingError(VitError):
    """A recipe that cannot be run as written."""


class DatasetError(TrainingError):
    """Training or evaluation data that are missing, unreadable or degenerate."""


def first_problem(error: Any) -> str:
    """One line from a pydantic ValidationError: where and what."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ").replace("\n", " ")
    return f"{where}: {message}" if where else message
