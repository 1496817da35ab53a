"""What the service's logging lets through."""

from __future__ import annotations

import struct
import subprocess
import sys

CODE = """
import sys
from model.errors import InvalidImage
from model.images.decode import decode
from service import logs
logs.configure("text", "debug")
try:
    decode(sys.stdin.buffer.read(), max_pixels=10_000)
except InvalidImage as error:
    print(error)
"""


def test_pillow_logs_nothing_of_the_files_that_it_reads():
    # 32 x 32 pixels of 65,535 samples, which Pillow calls an error.
    fields = [(256, 32), (257, 32), (258, 8), (259, 1), (262, 1), (273, 8), (277, 65_535), (279, 1024)]
    entries = b"".join(struct.pack("<HHLL", tag, 3, 1, value) for tag, value in fields)
    data = b"II*\0\x08\0\0\0" + struct.pack("<H", len(fields)) + entries + bytes(2048)

    done = subprocess.run([sys.executable, "-c", CODE], input=data, capture_output=True, check=True)

    assert b"samples per pixel" in done.stdout
    assert done.stderr == b""
