"""One end of a connection between a web worker and an engine process, which carries frames."""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from service.extensions.cluster import frames

# Longest frame: a model may have a million labels.
MAX_BYTES: Final = 256 << 20

# Read-ahead of a connection: the answers of a batch arrive together.
AHEAD_BYTES: Final = 32 << 10


class Connection(asyncio.BufferedProtocol):
    """One end of a connection: sends frames, and hands received frames over until it ends.

    A long frame is received into its own memory, and its pixels are a view of it. So a picture is
    copied once.

    Args:
        on_made: called with the connection when it can send; returns the function that takes the
            received frames, one after another.
    """

    def __init__(self, on_made: "Callable[[Connection], Callable[[frames.Frame], object]]") -> None:
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._into = self._ahead
        self._filled = 0
        self._is_over = asyncio.Event()
        self._error: frames.FrameError | None = None

    def send(self, frame: frames.Frame | frames.Reply) -> None:
        """Send a frame; it is lost if the peer has disconnected."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(frame))

    def close(self) -> None:
        """Close the connection after all frames are sent."""
        if self._transport is not None:
            self._transport.close()

    async def ended(self) -> None:
        """Wait until the connection ends.

        Raises:
            FrameError: the peer sent bytes that `encode` does not produce, or a frame out of order.
        """
        await self._is_over.wait()
        if self._error is not None:
            raise self._error

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a stream
        """See `asyncio.BaseProtocol`."""
        self._transport = transport
        self._receive = self._on_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = None
        self._is_over.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return self._into[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._filled += nbytes
        try:
            if self._into is self._ahead:
                self._cut()
            elif self._filled == len(self._into):
                frame = frames.decoder.decode(self._into)
                self._into = self._ahead
                self._filled = 0
                self._receive(frame)
        except (frames.FrameError, msgspec.MsgspecError) as error:
            self._error = frames.FrameError(f"not a frame: {error}")
            self.close()

    def _cut(self) -> None:
        """Decode the frames in the read-ahead; receive a longer frame into its own memory."""
        ahead = self._ahead[: self._filled]
        begin = 0
        while self._filled >= begin + frames.LENGTH_BYTES:
            length = int.from_bytes(ahead[begin : begin + frames.LENGTH_BYTES], "little")
            if length > MAX_BYTES:
                raise frames.FrameError(f"{length} bytes: at most {MAX_BYTES} are allowed")
            frame = ahead[begin + frames.LENGTH_BYTES : begin + frames.LENGTH_BYTES + length]
            if len(frame) < length and length > AHEAD_BYTES - frames.LENGTH_BYTES:
                # A bytearray would be filled with zeros first.
                self._into = np.empty(length, np.uint8).data
                self._filled = len(frame)
                self._into[: len(frame)] = frame
                return
            if len(frame) < length:
                break
            self._receive(frames.decoder.decode(bytes(frame)))
            begin += frames.LENGTH_BYTES + length
        rest = bytes(ahead[begin:])
        self._ahead[: len(rest)] = rest
        self._filled = len(rest)
