"""The boxes of an AVIF file."""


def has_whole_boxes(data: bytes | bytearray) -> bool:
    """Return whether the top boxes of an ISO media file fill the file."""
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size == 0:  # the box extends to the end of the file
            return True
        if size < 8:
            return False
        position += size
    return position == len(data)
