"""Decoder processes of a web process: each takes a job and answers with pixels or an error.

They start on demand and stay for the next job. `model.images.decoder_process` confines them.
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
from model.errors import SMALLER_PICTURE, ImageError, ImageTooCostly, InvalidImage
from model.images.decoder_process import ANSWER, CONFINED, DONE, ERRORS, JOB
from model.images.heatmap import MAX_SIZE
from model.images.preprocess import ModelInput, Region
from service.children import start_python
from service.errors import DeadlineExceeded, EngineUnavailable
from service.settings import Settings
from service.web.lanes import Deadline

logger = logging.getLogger("vitserve")

MAX_DECODERS: Final = 8
MAX_SECONDS: Final = 2.0
"""Longest processor time of a job."""

_SLOW_SECONDS: Final = 0.5
"""Time after which a decoder's priority is lowered."""
_MORE_NICENESS: Final = 10
_MAX_TEXT_BYTES: Final = 4096

PIXEL_BYTES: Final = 6.5
"""Address space of a decoder for each allowed pixel: 416 MB for 64 million."""
_SPARE_BYTES: Final = 64 << 20
"""Further address space for tables, the resize and the interpreter."""

_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Environment variables that an interpreter may need to start; others may hold keys."""

Answer = tuple[int, bytearray, bytearray]
"""Status, JSON and pixels, unchecked."""


class _Killed(Exception):
    """An operator, or the system when memory ran out, ended the decoder."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture as the model sees it, or its photo, and the seconds of its decoding."""

    picture: ModelInput
    seconds: float


class _Decoder:
    """One decoder process.

    Attributes:
        is_ready: whether the process has started.
        is_slow: whether its priority was lowered.
    """

    def __init__(self, bounds: dict[str, Any]) -> None:
        self._socket, child_socket = socket.socketpair()
        self._socket.setblocking(False)
        with child_socket:
            self._process = start_python(
                "model.images.decoder_process",
                json.dumps(bounds),
                allowed=_KEPT_VARIABLES,
                # Each thread takes address space, by which the memory is limited.
                more={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdin=child_socket.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # libtiff prints its errors there
                # A signal to the service's process group must not end a decoder in use.
                start_new_session=True,
            )
        self.is_ready = False
        self.is_slow = False

    async def ask(self, header: bytes, data: bytearray) -> Answer:
        """Return the answer to a job.

        Raises:
            ConnectionError: the process ended.
            ValueError: the answer is too long.
        """
        loop = asyncio.get_running_loop()
        if not self.is_ready:
            await self._wait_until_ready()
        slow_timer = loop.call_later(_SLOW_SECONDS, self._lower_priority)
        try:
            await loop.sock_sendall(self._socket, JOB.pack(len(header), len(data)) + header)
            await loop.sock_sendall(self._socket, data)
            status, text_bytes, pixel_bytes = ANSWER.unpack(await self._receive(ANSWER.size))
            if text_bytes > _MAX_TEXT_BYTES or pixel_bytes > MAX_SIZE * MAX_SIZE * 3:
                raise ValueError("too long")
            text = await self._receive(text_bytes)
            pixels = await self._receive(pixel_bytes)
            return status, text, pixels
        finally:
            slow_timer.cancel()

    async def _wait_until_ready(self) -> None:
        confined = await self._receive(len(CONFINED)) == CONFINED
        logger.info(
            "decoder process %d is confined by resource limits%s",
            self._process.pid,
            " and a filter of system calls"
            if confined
            else " only; install vitserve[isolation] for a filter of system calls",
        )
        self.is_ready = True

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
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + _MORE_NICENESS
            os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    def end(self, patience_seconds: float = 0.0) -> int:
        """Return the exit code of the process, or kill it after some seconds and return 0.

        Blocks until the process has freed its memory, which takes long on busy processors.
        """
        self._socket.close()
        try:
            return self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return 0


class Decoders:
    """Decodes files in separate processes; `on_restart` is called for each that died or was ended.

    Attributes:
        processes: most simultaneous jobs, at most one for each core; callers keep this limit.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_restart: Callable[[], object] = lambda: None,
        pixel_bytes: float = PIXEL_BYTES,
    ) -> None:
        picture_bytes = math.ceil(settings.max_image_pixels * pixel_bytes)
        # Each file is held up to three times: as sent, as its format unpacks it, and by the reader.
        file_bytes = 3 * settings.max_upload_bytes
        self._bounds = {
            "max_pixels": settings.max_image_pixels,
            "scaled_decode": settings.scaled_decode,
            "seconds": MAX_SECONDS,
            "max_bytes": picture_bytes + file_bytes + _SPARE_BYTES,
        }
        self._on_restart = on_restart
        all_processes = min(os.cpu_count() or 1, MAX_DECODERS)
        self.processes = math.ceil(all_processes / settings.workers)
        self._idle: list[_Decoder] = []

    async def model_input(
        self, data: bytearray, config: PreprocessConfig, deadline: Deadline
    ) -> Decoded:
        """Return a file's picture as the model sees it; see `preprocess.model_input`.

        Raises:
            ImageError: the picture cannot be decoded, or not in `MAX_SECONDS`.
            DeadlineExceeded: the request's deadline passed.
            EngineUnavailable: a decoder process cannot be started.
        """
        return await self._run({"config": config.model_dump(mode="json")}, data, deadline)

    async def photo(
        self, data: bytearray, region: Region, size: int | None, deadline: Deadline
    ) -> Decoded:
        """Return a file's photo, and the region in it; see `preprocess.upright_photo`.

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
            raise DeadlineExceeded("the deadline passed before the picture was decoded") from None
        except _Killed:
            raise InvalidImage(
                "the picture does not decode: its decoder was killed twice"
            ) from None
        if isinstance(answer, ImageError):
            raise answer
        return answer

    async def _ask(self, job: dict[str, Any], data: bytearray) -> Decoded | ImageError:
        """Return a decoder's answer to a job.

        If the answer is invalid or the caller leaves, the decoder is ended.
        """
        decoder = self._idle.pop() if self._idle else _Decoder(self._bounds)
        try:
            answer = _checked(await decoder.ask(json.dumps(job).encode(), data), job)
        except BaseException as error:
            self._on_restart()
            await _end_failed(decoder, error)
            raise
        if decoder.is_slow:  # a process cannot raise its priority again, and may hold much memory
            asyncio.get_running_loop().run_in_executor(None, decoder.end)
        else:
            self._idle.append(decoder)
        return answer

    def close(self) -> None:
        """End all idle processes; the others end with their jobs."""
        while self._idle:
            self._idle.pop().end()


async def _end_failed(decoder: _Decoder, error: BaseException) -> None:
    """End a decoder, and raise the error that its exit code and `error` tell, if any."""
    patience_seconds = 1.0 if isinstance(error, ConnectionError) else 0.0
    code = await asyncio.to_thread(decoder.end, patience_seconds)
    if code == -signal.SIGKILL:
        raise _Killed from None
    if code and not decoder.is_ready:
        raise EngineUnavailable("a decoder process cannot be started") from error
    if code == -signal.SIGPROF:
        raise ImageTooCostly(
            f"decoding the picture takes more than {MAX_SECONDS:g} s of a processor: "
            f"{SMALLER_PICTURE}"
        ) from None
    if isinstance(error, ConnectionError | ValueError | LookupError | TypeError):
        raise InvalidImage("the picture does not decode: its decoder crashed") from error


def _checked(answer: Answer, job: dict[str, Any]) -> Decoded | ImageError:
    """Return the picture or the error in an answer.

    Raises:
        ValueError, LookupError, TypeError: the answer is invalid.
    """
    status, text, pixels = answer
    if status != DONE:
        return ERRORS[status - 1](text.decode(errors="replace"))
    facts = json.loads(text)
    shape = tuple(map(int, facts["shape"]))
    region = Region(*map(float, facts["region"]))
    if "config" in job:
        is_expected = shape == (*job["config"]["size"], len(job["config"]["mean"]))
    else:
        is_expected = len(shape) == 3 and shape[2] == 3 and 0 < min(shape) <= max(shape) <= MAX_SIZE
    if not is_expected or not all(map(math.isfinite, region)):
        raise ValueError("pixels of another shape")
    picture = ModelInput(np.frombuffer(pixels, np.uint8).reshape(shape), region)
    return Decoded(picture, float(facts["seconds"]))
