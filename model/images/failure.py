"""Why a picture does not decode, in words that its sender can act on."""

import re
from typing import Final

from model.errors import SMALLER_PICTURE

_TRUNCATED: Final = "it is truncated: send the whole file"
_UNKNOWN: Final = "it is truncated or corrupt: send the whole file"

# Messages of the libraries about data of which they miss a part, and about other damage.
_ABOUT_THE_END: Final = re.compile("truncated|end of file", re.IGNORECASE)
_CRYPTIC: Final = re.compile("decoder error|unknown data organization|BMFF")

# libwebp says this for a lack of memory, too.
_NO_DECODER: Final = "could not create decoder object"


def reason(name: str, data: bytes | bytearray, error: BaseException) -> str:
    """Return why a file does not decode, in one line; hide messages of unexpected exceptions.

    Args:
        name: result of `formats.format_of`.
        data: the file.
        error: what Pillow raised.
    """
    text = error.args[0] if error.args else None
    if not isinstance(error, OSError | RuntimeError | SyntaxError | ValueError):
        text = None
    if is_truncated(name, data):
        return _TRUNCATED
    if not isinstance(text, str) or _CRYPTIC.search(text):
        return _UNKNOWN
    if _ABOUT_THE_END.search(text):
        return _TRUNCATED
    if text == _NO_DECODER:
        return f"it is corrupt, or takes more memory than is allowed: {SMALLER_PICTURE}"
    return " ".join(text.split())[:160]


def is_truncated(name: str, data: bytes | bytearray) -> bool:
    """Return whether a WebP, AVIF or HEIC file has fewer bytes than it says itself."""
    if name == "WEBP":  # RIFF, the bytes after this number, WEBP
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    return name in ("AVIF", "HEIF") and _has_partial_box(data)


def _has_partial_box(data: bytes | bytearray) -> bool:
    """Return whether the last box on top of an ISO media file extends beyond its end."""
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size == 0:  # the box extends to the end of the file
            return False
        if size < 8:
            return True
        position += size
    return position > len(data)
