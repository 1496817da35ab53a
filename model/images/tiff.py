"""The samples of a TIFF: which are read, and how many bits they use."""

from typing import Final

from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from model.errors import UnsupportedImageFormat

# Message for a TIFF whose samples cannot be read, or not as they are meant.
OTHER_SAMPLES: Final = (
    "TIFF pictures with these samples (bits, sample format or WhiteIsZero) are not read: convert "
    "it to 8 bits per sample, or to PNG"
)
# Most bits of a sensor whose pixels are stored in 16 bits.
_MOST_SENSOR_BITS: Final = 14
_COLOURS: Final = ("RGB", "RGBA", "RGBX", "CMYK")


def check_samples(image: TiffImageFile) -> None:
    """Raise `UnsupportedImageFormat` if Pillow would silently read a TIFF too dark or inverted."""
    tags = image.tag_v2
    is_inverted = tags.get(262) == 0 and image.mode.startswith(("I", "F"))
    is_dark = 16 in tags.get(258, ()) and image.mode in _COLOURS and bits_of_16(image) < 16
    if is_inverted or is_dark:
        raise UnsupportedImageFormat(OTHER_SAMPLES)


def bits_of_16(image: Image.Image) -> int:
    """Return the number of bits that samples stored in 16 bits use, 8...16.

    A camera's 10, 12 or 14 bits are stated by a TIFF's BitsPerSample, or by its MaxSampleValue.
    """
    if not isinstance(image, TiffImageFile):
        return 16
    bits = max(int(image.tag_v2[258][0]), 8)
    highest = image.tag_v2.get(281)
    if highest:
        used = max(int(max(highest)).bit_length(), 8)
        if used <= _MOST_SENSOR_BITS:
            bits = min(bits, used)
    return bits
