"""The errors below the server, as types. They know neither HTTP nor exit codes.

`service.web.problems` maps them to HTTP statuses and `service.cli.main` to exit codes. Each message
is one line that names the cause and, if there is one, the remedy.
"""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pydantic import ValidationError


SMALLER_PICTURE: Final = "send a smaller picture, or a JPEG or PNG"
"""The remedy for a picture that takes too much to decode."""

_MAX_MESSAGE: Final = 1900
# Characters kept at a message's end, which often says what to do.
_MESSAGE_END: Final = 400
# Characters of an unknown name that are compared with the known ones.
_MAX_COMPARED: Final = 50


class VitError(Exception):
    """Root of all errors that vitserve raises on purpose."""


class ImageError(VitError):
    """The picture cannot be used. Only its sender is affected."""


class UnsupportedImageFormat(ImageError):
    """The bytes do not start with the magic of an allowed format."""


class ImageTooLarge(ImageError):
    """The picture has more pixels than the limit allows; raised before they are allocated."""


class ImageTooCostly(ImageError):
    """Decoding the picture takes more processor time or memory than is allowed."""


class InvalidImage(ImageError):
    """The picture is of an allowed format, but truncated, corrupt or empty."""


class CheckpointError(VitError):
    """The checkpoint is missing or incomplete, or its config describes another network.

    The message names the file. It is one line of bounded length, whatever names and values of the
    file are in it.
    """

    def __init__(self, message: str) -> None:
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE - _MESSAGE_END]}…{message[-_MESSAGE_END:]}"
        super().__init__(printable(message))


class CheckpointChanged(RuntimeError):
    """An output needs the checkpoint's files again, and they changed since they were loaded."""


class DeviceError(VitError):
    """The requested device or dtype is not available here."""


class NotFinite(DeviceError):
    """The model's scores are not finite in the dtype that it computes in."""


class NewProcessNeeded(DeviceError):
    """This process can no longer use the device; a new process with another option can.

    Attributes:
        option: name of the option, which is also the name of a setting.
        value: value of the option in the new process.
    """

    def __init__(self, message: str, option: str, value: str | int) -> None:
        super().__init__(message)
        self.option = option
        self.value = value


class InputError(VitError):
    """The loaded model does not offer the value of a parameter.

    Attributes:
        parameter: name of the offending parameter, as the caller spells it.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class ExtensionError(VitError):
    """An installed extension cannot be loaded. The message names its package."""


class TrainingError(VitError):
    """The recipe cannot be run as written."""


class DatasetError(TrainingError):
    """The training or evaluation data are missing, unreadable or degenerate."""


def printable(text: str) -> str:
    """Return a text in one line, with escapes for characters that do not print."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def by_likeness(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names, the most similar to an unknown name first."""
    unknown = name[:_MAX_COMPARED].lower()

    def rank(candidate: str) -> tuple[float, str]:
        return -SequenceMatcher(None, candidate.lower(), unknown).ratio(), candidate

    return sorted(known, key=rank)


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the known name that an unknown one probably means, or an empty text.

    Args:
        name: the unknown name, in any case and with hyphens or underscores.
        known: all known names.
        likeness: lowest ratio of `difflib.SequenceMatcher`, 0 to 1.
    """
    spelled = {_spelled(candidate): candidate for candidate in known}
    near = get_close_matches(_spelled(name[:_MAX_COMPARED]), spelled, 1, likeness)
    return spelled[near[0]] if near else ""


def _spelled(name: str) -> str:
    return name.lower().replace("-", "_")


def first_problem(error: "ValidationError") -> str:
    """Return one line about the first problem of a pydantic error: its field and message."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = (
        first["msg"]
        .removeprefix("Value error, ")
        .replace("\n", " ")
        .replace("Input should be ", "expected ")
        .replace("Extra inputs are not permitted", "unknown name")
        .replace(", unable to interpret input", ": true or false")
    )
    message = re.sub(r", unable to parse string as an? \w+", ", without a unit", message)
    return f"{field}: {message}" if field else message


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
