"""Pictures are shrunk before they are sent, no further than the service's own decoder would scale
them.

file -> decoded at 1/2, 1/4 or 1/8 -> turned upright -> JPEG of quality 95, or PNG where lossless
came
"""

import io
from typing import NamedTuple, TypeAlias

# With all of the colour: at half of it (4:2:0) top-1 of 48 photos changed once, and scores by half
# as much again.
_QUALITY = 95

# What a mode becomes: alpha is dropped, as by the service. Pictures of other modes are sent as they
# are.
_MODES = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "RGB": "RGB", "RGBA": "RGB", "CMYK": "RGB"}

# Pixels of the model's input that are left of a picture, at least, along both axes.
_MIN_FACTOR = 2

_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)


# (width, height) of a pixel that is sent, in pixels of the upright original.
Pixel: TypeAlias = tuple[float, float]


class Shrunk(NamedTuple):
    """A file to send."""

    data: bytes
    pixel: Pixel = (1.0, 1.0)


def shrink(data: bytes, side: int) -> Shrunk:
    """Return a JPEG or PNG file shrunk by 8, 4 or 2, so that both its sides keep twice `side`
    pixels.

    The file itself is returned if it is too small for that or of another format, if it would gain
    no bytes, if it does not decode (the service says why), and where Pillow is not installed.

    Args:
        data: a whole file.
        side: the longer side in pixels of what the service resizes a picture to.
    """
    try:
        from PIL import Image, ImageOps  # noqa: PLC0415  an extra of the client
    except ImportError:
        return Shrunk(data)
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
        (width, height), mode = image.size, _MODES.get(image.mode)
        scale = next(
            (each for each in (8, 4, 2) if min(width, height) >= _MIN_FACTOR * each * side), None
        )
        if scale is None or mode is None:
            return Shrunk(data)
        image.draft(None, (width // scale, height // scale))  # decodes a JPEG at that scale
        image.load()
        # Not where Pillow would look for an orientation, too, and the service does not; not
        # transparent colours.
        image.info = {name: value for name, value in image.info.items() if name == "exif"}
        small = image.convert(mode)
        if image.format == "PNG":
            small = small.reduce(scale)
        if small.getexif().get(_ORIENTATION) in _SIDEWAYS:
            width, height = height, width
        small = ImageOps.exif_transpose(small)
        file = io.BytesIO()
        small.save(
            file, "PNG" if image.format == "PNG" else "JPEG", quality=_QUALITY, subsampling=0
        )
    except Exception:  # noqa: BLE001  whatever Pillow's readers raise on broken bytes
        return Shrunk(data)
    if file.tell() >= len(data):
        return Shrunk(data)
    return Shrunk(file.getvalue(), (width / small.width, height / small.height))
