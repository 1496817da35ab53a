"""The end of listening, without losing a caller whom the kernel has accepted and the process has not.

A connection is complete before the process accepts it, and is reset when its listener closes. So a listener first
stops completing connections, then the loop accepts those that wait, and only then it is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
import sys

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_SYN = 0x02
# A classic packet filter that begins at the TCP header: drop what has the flag SYN in byte 13, pass the rest.
_INSTRUCTIONS = (
    (0x30, 0, 0, 13),  # load that byte
    (0x45, 0, 1, _SYN),  # unless it has the flag, skip one
    (0x06, 0, 0, 0),  # pass no byte
    (0x06, 0, 0, 0xFFFFFFFF),  # pass all bytes
)


def ignore_handshakes(listener: socket.socket) -> None:
    """Let a listening socket complete the connections that have begun, and begin no other, where Linux offers it.

    A caller tries again after a second, and is refused if nobody listens any more.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _INSTRUCTIONS))
    pointer = struct.pack("HL", len(_INSTRUCTIONS), ctypes.addressof(program))
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


def heed_handshakes(listener: socket.socket) -> None:
    """Undo `ignore_handshakes`, which outlasts the process that called it where others hold the socket."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # there was none
            listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def has_callers(listener: socket.socket) -> bool:
    """Return whether the kernel holds a connection that the process has not accepted."""
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    return bool(poll.poll(0))
