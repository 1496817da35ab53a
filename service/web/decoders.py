"""The decoder processes of a web process, as it sees them: a job goes in, pixels or an error come out.

They start when they are needed, and stay for the next job. What they may do is said in `model.images.decoder_process`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from model.config import PreprocessConfig
from model.errors import ImageError, ImageTooCostly, InvalidImage
from model.images.decoder_process import ANSWER, CONFINED, DONE, ERRORS, JOB
from model.images.heatmap import MAX_SIZE
from model.images.preprocess import ModelInput
from model.images.region import Region
from service.errors import DeadlineExceeded, EngineUnavailable
from service.settings import Settings
from service.web.lanes import Deadline

logger = logging.getLogger("vitserve")

MAX_DECODERS: Final = 8
SECONDS: Final = 2.0
"""Processor time of a job at most; more is refused."""

_SLOW_SECONDS: Final = 0.5
"""Time after which a job leaves the processor to others."""
_MORE_NICENESS: Final = 10
_MAX_TEXT: Final = 4096

_PIXEL_BYTES: Final = 6.5
"""Address space of a decoder for each pixel that is allowed: 416 MB for 64 million."""
_SPARE_BYTES: Final = 64 << 20
"""Address space beside that, for tables, the resize and the interpreter."""

_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""What an interpreter may need to start. Other variables may hold keys."""
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Each thread of these libraries takes address space, which is what memory is limited by."""

_IsShape = Callable[[tuple[int, ...]], bool]
"""Whether pixels of this shape may be the answer to a job."""


class _Killed(Exception):
    """Somebody else ended the decoder: an operator, or the system for want of memory."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture as the model sees it, or the photo that it comes from, and the seconds that decoding took."""

    picture: ModelInput
    seconds: float


@dataclass(slots=True)
class _Decoder:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    is_ready: bool = False
    is_slow: bool = False

    def lower_priority(self) -> None:
        self.is_slow = True
        if self.process.poll() is None:
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + _MORE_NICENESS)

    def end(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


class Decoders:
    """Decodes files in processes of their own, a job each; `on_restart` is called for each that died.

    Attributes:
        processes: jobs that may run at the same time, one for each core at most; callers see to it.
    """

    def __init__(self, settings: Settings, *, on_restart: Callable[[], object] = lambda: None) -> None:
        pixels, file_bytes = settings.max_image_pixels, settings.max_upload_bytes
        bounds = {
            "max_pixels": pixels,
            "scaled_decode": settings.scaled_decode,
            "seconds": SECONDS,
            # The file, what its format makes of it, and what the reader holds.
            "max_bytes": math.ceil(pixels * _PIXEL_BYTES) + _SPARE_BYTES + 3 * file_bytes,
        }
        self._command = [sys.executable, "-P", "-m", "model.images.decoder_process", json.dumps(bounds)]
        self._on_restart = on_restart
        self.processes = -(-min(os.cpu_count() or 1, MAX_DECODERS) // settings.workers)
        self._idle: list[_Decoder] = []
        self._is_known = False

    async def model_input(self, data: bytearray, config: PreprocessConfig, deadline: Deadline) -> Decoded:
        """Return the picture in a file as the model sees it; see `model.images.preprocess.model_input`.

        Raises `ImageError`, `ImageTooCostly` where it takes too long, `DeadlineExceeded`, and `EngineUnavailable` if no
        process can be started.
        """
        shape = (*config.size, len(config.mean))
        return await self._run({"config": config.model_dump(mode="json")}, data, deadline, lambda got: got == shape)

    async def photo(self, data: bytearray, region: Region, size: int | None, deadline: Deadline) -> Decoded:
        """Return the photo in a file and where the region lies in it; see `model.images.preprocess.upright_photo`.

        Raises as `model_input`.
        """

        def is_photo(shape: tuple[int, ...]) -> bool:
            return len(shape) == 3 and shape[2] == 3 and 0 < min(shape) <= max(shape) <= MAX_SIZE

        return await self._run({"region": region, "size": size}, data, deadline, is_photo)

    async def _run(self, job: dict[str, Any], data: bytearray, deadline: Deadline, is_shape: _IsShape) -> Decoded:
        try:
            async with asyncio.timeout(deadline.remaining()):
                try:
                    return await self._ask(json.dumps(job).encode(), data, is_shape)
                except _Killed:
                    return await self._ask(json.dumps(job).encode(), data, is_shape)
        except TimeoutError:
            raise DeadlineExceeded("the time was up before the picture was decoded") from None
        except _Killed:
            raise InvalidImage("the picture does not decode: its decoder was killed, twice") from None

    async def _ask(self, header: bytes, data: bytearray, is_shape: _IsShape) -> Decoded:
        """Return a decoder's answer to a job; the decoder ends where its answer is invalid or the caller leaves."""
        decoder = self._idle.pop() if self._idle else self._start()
        loop, slow = asyncio.get_running_loop(), None
        try:
            if not decoder.is_ready:
                self._say_once(await _receive(decoder.socket, len(CONFINED)))
                decoder.is_ready = True
            slow = loop.call_later(_SLOW_SECONDS, decoder.lower_priority)
            await loop.sock_sendall(decoder.socket, JOB.pack(len(header), len(data)) + header)
            await loop.sock_sendall(decoder.socket, data)
            status, text_bytes, pixel_bytes = ANSWER.unpack(await _receive(decoder.socket, ANSWER.size))
            if text_bytes > _MAX_TEXT or pixel_bytes > MAX_SIZE * MAX_SIZE * 3:
                raise ValueError("too long")
            text, pixels = await _receive(decoder.socket, text_bytes), await _receive(decoder.socket, pixel_bytes)
            answer = _answer(status, text, pixels, is_shape)
        except BaseException as error:
            code = decoder.process.wait(1) if isinstance(error, ConnectionError) else None
            decoder.end()
            self._on_restart()
            if code == -signal.SIGKILL:
                raise _Killed from None
            if code is not None and not decoder.is_ready:
                raise EngineUnavailable("no process that decodes pictures can be started") from error
            if code == -signal.SIGPROF:
                raise ImageTooCostly(f"decoding the picture takes more than {SECONDS:g} s of a processor") from None
            if isinstance(error, ConnectionError | ValueError | LookupError | TypeError):
                raise InvalidImage("the picture does not decode: its decoder crashed") from error
            raise
        finally:
            if slow is not None:
                slow.cancel()
        if decoder.is_slow:  # a process cannot take its priority back, and may hold much memory
            decoder.end()
        else:
            self._idle.append(decoder)
        if isinstance(answer, ImageError):
            raise answer
        return answer

    def _start(self) -> _Decoder:
        path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path)
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONPATH": path, **kept, **_ONE_THREAD},
                start_new_session=True,  # signals to the service's group are not for those that it still needs
            )
        return _Decoder(process, ours)

    def _say_once(self, hello: bytearray) -> None:
        if not self._is_known:
            self._is_known = True
            more = " and a filter of system calls" if hello == CONFINED else ": without libseccomp, no filter of calls"
            logger.info("decoder processes are held by resource limits%s", more)

    def close(self) -> None:
        """End all processes that have no job; the others end with their jobs."""
        while self._idle:
            self._idle.pop().end()


def _answer(status: int, text: bytearray, pixels: bytearray, is_shape: _IsShape) -> Decoded | ImageError:
    """Return the picture or the error in an answer; raises `ValueError`, `LookupError` or `TypeError` if invalid."""
    if status != DONE:
        return ERRORS[status - 1](text.decode(errors="replace"))
    facts = json.loads(text)
    shape, region = tuple(map(int, facts["shape"])), Region(*map(float, facts["region"]))
    if not is_shape(shape) or not all(map(math.isfinite, region)):
        raise ValueError("pixels of another shape")
    return Decoded(ModelInput(np.frombuffer(pixels, np.uint8).reshape(shape), region), float(facts["seconds"]))


async def _receive(source: socket.socket, size: int) -> bytearray:
    """Return so many bytes; raises `ConnectionError` if they end before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = await asyncio.get_running_loop().sock_recv_into(source, view)
        if count == 0:
            raise ConnectionResetError
        view = view[count:]
    return data
