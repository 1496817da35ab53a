"""The decoder processes of a web process, as it sees them: a job goes in, pixels or an error come out.

    quick:  at most 0.15 s of processor time, 4 megapixels; processes that are kept
    slow:   what was no quick job after all, at low priority, up to VIT_DECODE_SECONDS; a fresh process each

A file that costs a lot therefore keeps others waiting for 0.15 s, and then only those that cost a lot too. What the
processes may do is said in `model.images.decoder_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from model.config import PreprocessConfig
from model.errors import ImageError, ImageTooCostly, InvalidImage
from model.images.decoder_process import ANSWER, DONE, ERRORS, HELLO, JOB, TOO_MUCH
from model.images.heatmap import MAX_SIZE
from model.images.preprocess import ModelInput
from model.images.region import Region
from service.errors import DeadlineExceeded, EngineUnavailable
from service.settings import Settings
from service.web.lanes import Deadline

logger = logging.getLogger("vitserve")

_QUICK_SECONDS: Final = 0.15
_MAX_TEXT: Final = 4096
_HELLO_SECONDS: Final = 3.0
"""Time in which a new decoder sends its first bytes."""
_LEAST_SECONDS: Final = 0.5
"""Processor time of a photo whose picture took all of its time."""

_PIXEL_BYTES: Final = 6.5
"""Address space of a decoder at most, for each pixel that is allowed: 416 MB for 64 million."""

_START: Final = "import sys; sys.path[:] = {path!r}; from model.images.decoder_process import main; main()"
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Each thread of these libraries takes address space, which is what memory is limited by."""

_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""What an interpreter may need to start. Other variables may hold keys."""

_IsShape = Callable[[tuple[int, ...]], bool]
"""Whether pixels of this shape may be the answer to a job."""


class _Died(Exception):
    """The decoder process ended instead of answering."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture as the model sees it, or the photo that it comes from, and the seconds that decoding took."""

    picture: ModelInput
    seconds: float


class Decoders:
    """Decodes files in processes of their own, which start when they are needed, and does `quick` jobs at once.

    `on_restart` is called for each process that died or was killed at a job.
    """

    def __init__(self, settings: Settings, *, quick: int, on_restart: Callable[[], object] = lambda: None) -> None:
        self._bounds: dict[str, Any] = {
            "max_pixels": settings.max_image_pixels,
            "max_bytes": math.ceil(settings.max_image_pixels * _PIXEL_BYTES),
            "scaled_decode": settings.scaled_decode,
        }
        self._seconds = settings.decode_seconds
        self._on_restart = on_restart
        self._quick, self._slow = asyncio.Semaphore(quick), asyncio.Semaphore(1)
        self._idle: list[socket.socket] = []
        self._template: subprocess.Popen[bytes] | None = None
        self._control: asyncio.Task[socket.socket] | None = None

    async def model_input(self, data: bytearray, config: PreprocessConfig, deadline: Deadline) -> Decoded:
        """Return the picture in a file as the model sees it; see `model.images.preprocess.model_input`.

        Raises `ImageError`, `ImageTooCostly` where it takes too long, `DeadlineExceeded`, and `EngineUnavailable` if no
        process can be started.
        """
        shape = (*config.size, len(config.mean))
        return await self._run({"config": config.model_dump(mode="json")}, data, deadline, lambda got: got == shape)

    async def photo(
        self, data: bytearray, region: Region, size: int | None, deadline: Deadline, *, spent: float = 0.0
    ) -> Decoded:
        """Return the photo in a file and where the region lies in it; see `model.images.preprocess.upright_photo`.

        Decoding the file took `spent` seconds before, which are a part of its time. Raises as `model_input`.
        """

        def is_photo(shape: tuple[int, ...]) -> bool:
            return len(shape) == 3 and shape[2] == 3 and 0 < min(shape) <= max(shape) <= MAX_SIZE

        return await self._run({"region": region, "size": size}, data, deadline, is_photo, spent=spent)

    async def _run(
        self, job: dict[str, Any], data: bytearray, deadline: Deadline, is_shape: _IsShape, *, spent: float = 0.0
    ) -> Decoded:
        began = math.inf
        seconds = max(min(_LEAST_SECONDS, self._seconds), self._seconds - spent)
        try:
            async with asyncio.timeout(deadline.remaining()):
                async with self._quick:
                    decoder = self._idle.pop() if self._idle else await self._start()
                    quick = {**job, **self._bounds, "quick": True, "seconds": min(_QUICK_SECONDS, seconds)}
                    # What dies here, by whatever, may do better with more time and in a new process.
                    with contextlib.suppress(_Died):
                        answer = await self._attempt(decoder, quick, data, is_shape)
                        self._idle.append(decoder)
                        if answer is not None:
                            return _pixels(answer)
                async with self._slow:
                    decoder = await self._start()
                    began = time.monotonic()
                    slow = {**job, **self._bounds, "quick": False, "seconds": seconds}
                    with decoder:
                        answer = await self._attempt(decoder, slow, data, is_shape)
                    assert answer is not None, "a slow job is done, or fails"
                    return _pixels(answer)
        except TimeoutError:
            raise DeadlineExceeded("the time was up before the picture was decoded") from None
        except _Died:
            if time.monotonic() - began < seconds / 2:  # a codec may use two threads
                raise InvalidImage("the picture does not decode: its decoder crashed") from None
            raise ImageTooCostly(f"decoding the picture takes more than {self._seconds:g} s of a processor") from None

    async def _attempt(
        self, decoder: socket.socket, job: dict[str, Any], data: bytearray, is_shape: _IsShape
    ) -> Decoded | ImageError | None:
        """Return a decoder's answer to a job, or None if a quick job takes too long; raises `_Died`.

        Closing its socket kills the decoder, when its answer is invalid or the caller leaves.
        """
        loop = asyncio.get_running_loop()
        try:
            header = json.dumps(job).encode()
            await loop.sock_sendall(decoder, JOB.pack(len(header), len(data)) + header)
            await loop.sock_sendall(decoder, data)
            status, text_bytes, pixel_bytes = ANSWER.unpack(await _receive(decoder, ANSWER.size))
            if text_bytes > _MAX_TEXT or pixel_bytes > MAX_SIZE * MAX_SIZE * 3:
                raise ValueError("too long")
            text, pixels = await _receive(decoder, text_bytes), await _receive(decoder, pixel_bytes)
            return _answer(status, text, pixels, is_shape) if status != TOO_MUCH or not job["quick"] else None
        except BaseException as error:
            decoder.close()
            self._on_restart()
            if isinstance(error, OSError | ValueError | LookupError | TypeError):
                raise _Died from error
            raise

    async def _start(self) -> socket.socket:
        """Return the socket of a new decoder process; raises `EngineUnavailable` if there can be none."""
        for _ in range(3):  # the template may have been killed, as any process
            if self._control is None or (self._template is not None and self._template.poll() is not None):
                self.close()
                self._control = asyncio.create_task(self._start_template())
            template = self._control
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            try:
                # Whoever waits first may leave, and others wait too.
                control = await asyncio.shield(template)
                socket.send_fds(control, [b"f"], [theirs.fileno()])
                async with asyncio.timeout(_HELLO_SECONDS):
                    await _receive(ours, len(HELLO))
                return ours
            except (OSError, asyncio.CancelledError) as error:  # a template that is frozen is killed, too
                ours.close()
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                    raise
                if self._control is template:
                    self.close()
            finally:
                theirs.close()
        raise EngineUnavailable("no process that decodes pictures can be started")

    async def _start_template(self) -> socket.socket:
        """Start the process from which decoders are forked; raises `OSError` if it does not start."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._template = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=[str(Path(each).absolute()) for each in sys.path])],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _ONE_THREAD,
            )
        ours.setblocking(False)
        ready = await asyncio.get_running_loop().sock_recv(ours, 1)
        if not ready:
            ours.close()
            raise OSError("the process ended at its start")
        if ready == b"\0":
            logger.info("decoder processes are not kept from files and network: this system has no seccomp filter")
        return ours

    def close(self) -> None:
        """End all processes."""
        for decoder in self._idle:
            decoder.close()
        self._idle.clear()
        if self._control is not None and not self._control.cancel() and self._control.exception() is None:
            self._control.result().close()
        self._control = None
        if self._template is not None:
            self._template.kill()
            self._template.wait()
            self._template = None


def _pixels(answer: Decoded | ImageError) -> Decoded:
    """Return what was decoded, or raise the error."""
    if isinstance(answer, ImageError):
        raise answer
    return answer


def _answer(status: int, text: bytearray, pixels: bytearray, is_shape: _IsShape) -> Decoded | ImageError:
    """Return the picture or the error in an answer; raises `ValueError`, `LookupError` or `TypeError` if invalid."""
    if status != DONE:
        return ERRORS[status - 2](text.decode(errors="replace"))
    facts = json.loads(text)
    shape, region = tuple(map(int, facts["shape"])), Region(*map(float, facts["region"]))
    if not is_shape(shape) or not all(map(math.isfinite, region)):
        raise ValueError("pixels of another shape")
    return Decoded(ModelInput(np.frombuffer(pixels, np.uint8).reshape(shape), region), float(facts["seconds"]))


async def _receive(decoder: socket.socket, size: int) -> bytearray:
    """Return so many bytes; raises `OSError` if they end before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = await asyncio.get_running_loop().sock_recv_into(decoder, view)
        if count == 0:
            raise ConnectionResetError
        view = view[count:]
    return data
