"""Connects web workers to an engine process.

    web worker                                     engine process
    ----------                                     --------------
    RemoteEngine.infer                             EngineServer
      slot <- pixels                                 Submit -> Engine.infer(pixels in the slot)
      Submit          --- Unix socket, frames -->      (LocalEngine: the same queue for all workers)
      future  <-- Completed or Failed, ------------- answers of a batch leave in one write,
                  one wake-up a batch                so a worker wakes up once

The workers' requests meet in one queue, and batches mix them. A worker that dies takes its own requests
along and no others; an engine that dies is an `EngineUnavailable` for every request that it had. The
worker then waits at the same address for its successor.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import struct
from typing import cast

from service.cluster.protocol import Frame, FrameError, FrameReader, encode
from service.cluster.shared_memory import ImageSlots, SharedCounters, SharedFile, SharedText
from service.engine.messages import ModelInfo

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("iII")
"""The kernel's `struct ucred`: process, user and group."""


class EngineChannel:
    """Holds the socket and the shared memory between one engine process and the workers; made before they are forked.

    Attributes:
        listener: a Unix socket without a name in the file system. It outlives the engine process, so
            workers that connect meanwhile wait for its successor. Other users' processes are refused.
        key: proves that a process is a worker of this service, and no other process of this user.
        device: as the settings name it.
        pixels: memory for images, sized by the engine when it knows their size.
        failure: why the engine failed; empty as long as it did not.
        options: see `change_option`.
        device_name: the device's name from when an engine was first ready: `cpu` where the settings say `auto`.
    """

    def __init__(self, index: int, device: str, counters: SharedCounters, *, slots: int) -> None:
        self.index = index
        self.device = device
        self.counters = counters
        self.slots = slots
        self.key = secrets.token_bytes(32)
        self.pixels = SharedFile("pixels")
        self.failure = SharedText()
        self.options = SharedText()
        self.device_name = SharedText()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("")  # the kernel finds a free abstract address
        # Twice the workers: the connections of some that died may still wait beside their successors'.
        self.listener.listen(max(128, 2 * len(counters.worker_state)))

    def change_option(self, option: str, value: str | int) -> bool:
        """Let the engine's successors start with another value than the settings'; return whether that is new."""
        before = self.changed_options()
        self.options.write(json.dumps(before | {option: value}))
        return before.get(option) != value

    def changed_options(self) -> dict[str, str | int]:
        """Return the settings that the engine is to start with instead of those of the service."""
        changed: dict[str, str | int] = json.loads(self.options.read() or "{}")
        return changed

    def connect(self) -> socket.socket:
        """Return a non-blocking connection, accepted or waiting to be.

        Raises:
            BlockingIOError: too many connections wait to be accepted.
            OSError: nobody listens any more.
        """
        connection = socket.socket(self.listener.family, self.listener.type)
        connection.setblocking(False)
        try:
            connection.connect(self.listener.getsockname())
        except OSError:
            connection.close()
            raise
        return connection

    def grow_pixels(self, workers: int, info: ModelInfo) -> None:
        """Make room for the images of all workers; only the engine's process may."""
        self.pixels.grow(workers * ImageSlots.size(self.slots, info.input_shape))

    def image_slots(self, worker: int, info: ModelInfo) -> ImageSlots:
        """Return a worker's slots, once there is room for them."""
        return ImageSlots(self.pixels, worker, self.slots, info.input_shape)

    def close(self) -> None:
        """Close the socket and the memory."""
        self.listener.close()
        self.pixels.close()


def peer_user(connection: socket.socket) -> int:
    """Return the effective user id under which the other end of a Unix socket was connected, as the kernel saw it."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


class FrameProtocol(asyncio.Protocol):
    """Sends frames, those of one turn of the event loop in one write, and receives some of up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(limit)
        self._outgoing: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport that frames are sent by."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the transport; what is sent from now on is lost."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Hand on complete frames; bytes that are no frame end the connection."""
        try:
            for frame in self._reader.feed(data):
                self.frame_received(frame)
        except FrameError as error:
            logger.error("engine connection: %s", error)
            self.close()

    def frame_received(self, frame: Frame) -> None:
        """Handle one frame; a `FrameError` that this raises ends the connection."""
        raise NotImplementedError

    def send(self, frame: Frame) -> None:
        """Send a frame together with all others of this turn."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(encode(frame))

    def close(self) -> None:
        """Send the remaining frames, and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        if self._transport is not None and self._outgoing:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()
