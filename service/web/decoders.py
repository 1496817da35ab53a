"""The decoder processes of a web process, as it sees them: a job goes in, pixels or an error come
out.

They start when they are needed, and stay for the next job. What they may do is said in
`model.images.decoder_process`.
"""

import asyncio
import json
import logging
import math
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from model.config import PreprocessConfig
from model.errors import ImageError, ImageTooCostly, InvalidImage
from model.images.decoder_process import ANSWER, CONFINED, DONE, ERRORS, JOB
from model.images.heatmap import MAX_SIZE
from model.images.preprocess import ModelInput, Region
from service.children import start_python
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

Answer = tuple[int, bytearray, bytearray]
"""Status, JSON and pixels, as they came."""


class _Killed(Exception):
    """Somebody else ended the decoder: an operator, or the system for want of memory."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture as the model sees it, or the photo that it comes from, and the seconds that
    decoding took.
    """

    picture: ModelInput
    seconds: float


class _Decoder:
    """A process, `is_ready` when it has said so, and `is_slow` once it left the processor to
    others.
    """

    def __init__(self, bounds: dict[str, Any]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = start_python(
                "model.images.decoder_process",
                json.dumps(bounds),
                allowed=_KEPT_VARIABLES,
                # Each thread of these libraries takes address space, which is what memory is
                # limited by.
                more={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # libtiff prints there what is wrong with a file
                start_new_session=True,  # signals to the service's group are not for those that it still needs
            )
        self.is_ready = self.is_slow = False

    async def ask(self, header: bytes, data: bytearray) -> Answer:
        """Return the answer to a job; raises `ConnectionError` if there is none, and `ValueError`
        if it is too long.
        """
        loop = asyncio.get_running_loop()
        if not self.is_ready:
            confined = await self._receive(len(CONFINED)) == CONFINED
            more = (
                "and a filter of system calls"
                if confined
                else "alone: `vitserve[isolation]` adds a filter"
            )
            logger.info("decoder process %d is held by resource limits %s", self._process.pid, more)
            self.is_ready = True
        slow = loop.call_later(_SLOW_SECONDS, self._lower_priority)
        try:
            await loop.sock_sendall(self._socket, JOB.pack(len(header), len(data)) + header)
            await loop.sock_sendall(self._socket, data)
            status, text_bytes, pixel_bytes = ANSWER.unpack(await self._receive(ANSWER.size))
            if text_bytes > _MAX_TEXT or pixel_bytes > MAX_SIZE * MAX_SIZE * 3:
                raise ValueError("too long")
            return status, await self._receive(text_bytes), await self._receive(pixel_bytes)
        finally:
            slow.cancel()

    async def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = await asyncio.get_running_loop().sock_recv_into(self._socket, view)
            if count == 0:
                raise ConnectionResetError
            view = view[count:]
        return data

    def _lower_priority(self) -> None:
        self.is_slow = True
        if self._process.poll() is None:
            os.setpriority(
                os.PRIO_PROCESS,
                self._process.pid,
                os.getpriority(os.PRIO_PROCESS, 0) + _MORE_NICENESS,
            )

    def end(self, patience: float = 0.0) -> int:
        """End the process unless it ends by itself within so many seconds; return its exit code, 0
        if it did not.

        It blocks until the process has let go of its memory, which takes a slow one long beside
        others' work.
        """
        self._socket.close()
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return 0


class Decoders:
    """Decodes files in processes of their own, a job each; `on_restart` is called for each that
    died.

    Attributes:
        processes: jobs that may run at the same time, one for each core at most; callers see to it.
    """

    def __init__(
        self, settings: Settings, *, on_restart: Callable[[], object] = lambda: None
    ) -> None:
        pixels, file_bytes = settings.max_image_pixels, settings.max_upload_bytes
        self._bounds = {
            "max_pixels": pixels,
            "scaled_decode": settings.scaled_decode,
            "seconds": SECONDS,
            # The file, what its format makes of it, and what the reader holds.
            "max_bytes": math.ceil(pixels * _PIXEL_BYTES) + _SPARE_BYTES + 3 * file_bytes,
        }
        self._on_restart = on_restart
        self.processes = -(-min(os.cpu_count() or 1, MAX_DECODERS) // settings.workers)
        self._idle: list[_Decoder] = []

    async def model_input(
        self, data: bytearray, config: PreprocessConfig, deadline: Deadline
    ) -> Decoded:
        """Return the picture in a file as the model sees it; see
        `model.images.preprocess.model_input`.

        Raises `ImageError`, `ImageTooCostly` where it takes too long, `DeadlineExceeded`, and
        `EngineUnavailable` if no process can be started.
        """
        return await self._run({"config": config.model_dump(mode="json")}, data, deadline)

    async def photo(
        self, data: bytearray, region: Region, size: int | None, deadline: Deadline
    ) -> Decoded:
        """Return the photo in a file and where the region lies in it; see
        `model.images.preprocess.upright_photo`.

        Raises as `model_input`.
        """
        return await self._run({"region": region, "size": size}, data, deadline)

    async def _run(self, job: dict[str, Any], data: bytearray, deadline: Deadline) -> Decoded:
        try:
            async with asyncio.timeout(deadline.remaining()):
                try:
                    answer = await self._ask(job, data)
                except _Killed:
                    answer = await self._ask(job, data)
        except TimeoutError:
            raise DeadlineExceeded("the time was up before the picture was decoded") from None
        except _Killed:
            raise InvalidImage(
                "the picture does not decode: its decoder was killed, twice"
            ) from None
        if isinstance(answer, ImageError):
            raise answer
        return answer

    async def _ask(self, job: dict[str, Any], data: bytearray) -> Decoded | ImageError:
        """Return a decoder's answer to a job; the decoder ends where its answer is invalid or the
        caller leaves.
        """
        decoder = self._idle.pop() if self._idle else _Decoder(self._bounds)
        try:
            answer = _checked(await decoder.ask(json.dumps(job).encode(), data), job)
        except BaseException as error:
            self._on_restart()
            code = await asyncio.to_thread(
                decoder.end, 1.0 if isinstance(error, ConnectionError) else 0.0
            )
            if code == -signal.SIGKILL:
                raise _Killed from None
            if code and not decoder.is_ready:
                raise EngineUnavailable(
                    "no process that decodes pictures can be started"
                ) from error
            if code == -signal.SIGPROF:
                raise ImageTooCostly(
                    f"decoding the picture takes more than {SECONDS:g} s of a processor"
                ) from None
            if isinstance(error, ConnectionError | ValueError | LookupError | TypeError):
                raise InvalidImage("the picture does not decode: its decoder crashed") from error
            raise
        if decoder.is_slow:  # a process cannot take its priority back, and may hold much memory
            asyncio.get_running_loop().run_in_executor(None, decoder.end)
        else:
            self._idle.append(decoder)
        return answer

    def close(self) -> None:
        """End all processes that have no job; the others end with their jobs."""
        while self._idle:
            self._idle.pop().end()


def _checked(answer: Answer, job: dict[str, Any]) -> Decoded | ImageError:
    """Return the picture or the error in an answer; raises `ValueError`, `LookupError` or
    `TypeError` if invalid.
    """
    status, text, pixels = answer
    if status != DONE:
        return ERRORS[status - 1](text.decode(errors="replace"))
    facts = json.loads(text)
    shape, region = tuple(map(int, facts["shape"])), Region(*map(float, facts["region"]))
    if "config" in job:
        is_shape = shape == (*job["config"]["size"], len(job["config"]["mean"]))
    else:
        is_shape = len(shape) == 3 and shape[2] == 3 and 0 < min(shape) <= max(shape) <= MAX_SIZE
    if not is_shape or not all(map(math.isfinite, region)):
        raise ValueError("pixels of another shape")
    return Decoded(
        ModelInput(np.frombuffer(pixels, np.uint8).reshape(shape), region), float(facts["seconds"])
    )
