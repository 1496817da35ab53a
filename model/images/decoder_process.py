"""The processes that decode what may take long or break a decoder: each file costs nobody but its sender.

    service --"here is a socket"--> template --fork--> decoder <==job, answer==> service

The template is a fresh interpreter that has imported Pillow and this package, and reads no picture. It makes a decoder
in 3 ms where a start takes 0.3 s, so that killing a decoder is cheap, and all share its memory. A decoder has

* no keys and no model: the environment of the template is empty, and nothing of the service was ever in its memory;
* no network, no files, no other programs and no signals to others (a seccomp filter on Linux);
* limits of processor time and of address space for each job, set before a byte of the file is looked at;
* an end: whoever closes the other end of its socket kills it, wherever it is in a codec (SIGIO).

A job is a header in JSON and the file; an answer is a status, JSON and pixels. Neither side unpickles anything, as the
other may be in the hands of whoever wrote the picture.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import signal
import socket
import struct
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, ImageCms, ImageColor, ImageFilter, ImagePalette

from model.config import PreprocessConfig
from model.errors import ImageError, ImageTooCostly, ImageTooLarge, InvalidImage, UnsupportedImageFormat
from model.images.preprocess import model_input, upright_photo
from model.images.region import Region

if sys.platform != "win32":  # where the service imports this module and starts no process
    import fcntl
    import resource

JOB: Final = struct.Struct("<II")
"""Bytes of the header and of the file."""

ANSWER: Final = struct.Struct("<BII")
"""Status, bytes of the JSON and of the pixels."""

HELLO: Final = b"\1"
"""The first byte that a decoder sends; a frozen decoder does not."""

DONE: Final = 0
TOO_MUCH: Final = 1
"""The picture needs more memory than a quick job may take."""
ERRORS: Final = (UnsupportedImageFormat, ImageTooLarge, ImageTooCostly, InvalidImage)
"""Statuses from 2 on."""

_IMPORTED_LATE: Final = (ImageCms, ImageColor, ImageFilter, ImagePalette)
"""Modules that Pillow imports when a picture needs them, which a decoder no longer can."""

QUICK_PIXELS: Final = 4_194_304
"""Pixels of the largest picture that may be a quick job."""

_PIXEL_BYTES: Final = 16
"""Address space for each pixel that a file declares; libwebp, libavif and Pillow's own picture take that much."""
_SPARE_BYTES: Final = 64 << 20
"""Address space beside that, for tables, the resize and the interpreter."""
_SLOW_NICENESS: Final = 10

# open openat openat2 creat truncate unlink unlinkat rename renameat renameat2 mkdirat mknodat open_by_handle_at socket
# connect bind execve execveat ptrace process_vm_readv process_vm_writev kill tkill pidfd_open pidfd_getfd
# pidfd_send_signal io_uring_setup bpf keyctl userfaultfd tgkill rt_sigqueueinfo rt_tgsigqueueinfo mkdir mknod symlink
# symlinkat link linkat rmdir chmod fchmodat chown lchown fchownat shmget msgget semget
_DENIED_X86 = (
    "2 257 437 85 76 87 263 82 264 316 258 259 304 41 42 49 59 322 101 310 311 62 200 434 438 424 425 321 250 323 "
    "234 129 297 83 133 88 266 86 265 84 90 268 92 94 260 29 68 64"
)
_DENIED_ARM = (
    "56 437 45 35 38 276 34 33 265 198 203 200 221 281 117 270 271 129 130 434 438 424 425 280 219 282 "
    "131 138 240 36 37 53 54 194 186 190"
)
_FILTERS: Final = {"x86_64": (0xC000_003E, _DENIED_X86), "aarch64": (0xC000_00B7, _DENIED_ARM)}
"""By machine: its number for the kernel's audit, and the system calls that a decoder has no use for."""


def main() -> None:
    """Run the template: fork a decoder for every socket that comes on file descriptor 0, until that is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they go to whole groups, and the service may still need its decoders
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    if "pillow_heif" in sys.modules:
        sys.modules["pillow_heif"].options.DECODE_THREADS = 1
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared
    control = socket.socket(fileno=0)
    address_space = _address_space()
    control.sendall(b"\1" if _isolate() else b"\0")
    while True:
        descriptors = socket.recv_fds(control, 1, 1)[1]
        if not descriptors:
            return
        if os.fork() == 0:
            try:
                control.close()
                os.dup2(1, 2)  # what codecs print goes where standard output goes: nowhere
                _serve(socket.socket(fileno=descriptors[0]), address_space)
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _serve(service: socket.socket, address_space: int) -> None:
    """Run a decoder: answer jobs in turn, until the socket is closed or a slow job is done."""
    fcntl.fcntl(service, fcntl.F_SETOWN, os.getpid())
    service.sendall(HELLO)
    while head := service.recv(JOB.size, socket.MSG_WAITALL):
        header_bytes, file_bytes = JOB.unpack(head)
        job: dict[str, Any] = json.loads(_receive(service, header_bytes))
        # The file, what its format makes of it, and what the reader holds.
        limit = partial(_limit_memory, address_space + _SPARE_BYTES + 3 * file_bytes)
        limit(0)
        data = _receive(service, file_bytes)
        if not job["quick"]:
            os.nice(max(0, _SLOW_NICENESS - os.nice(0)))
        flags = fcntl.fcntl(service, fcntl.F_GETFL)
        fcntl.fcntl(service, fcntl.F_SETFL, flags | os.O_ASYNC)
        if _is_closed(service):  # before the signal was asked for
            return
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])
        status, text, pixels = _answer(job, data, limit)
        signal.setitimer(signal.ITIMER_PROF, 0)
        fcntl.fcntl(service, fcntl.F_SETFL, flags)
        limit(len(text) + pixels.nbytes)
        service.sendall(ANSWER.pack(status, len(text), pixels.nbytes) + text)
        service.sendall(pixels.data.cast("B") if pixels.nbytes else b"")
        if not job["quick"]:
            return  # a process cannot take its priority back, and may hold much memory


def _answer(job: dict[str, Any], data: bytearray, limit: Any) -> tuple[int, bytes, NDArray[np.uint8]]:
    """Return the status, JSON and pixels of the answer to a job."""

    capped = False

    def on_size(size: tuple[int, int]) -> None:
        nonlocal capped
        pixels = size[0] * size[1]
        capped = pixels * _PIXEL_BYTES > job["max_bytes"]
        if job["quick"] and pixels > QUICK_PIXELS:
            raise _TooMuch
        limit(min(pixels * _PIXEL_BYTES, job["max_bytes"]))

    started = time.perf_counter()
    bounds = {"max_pixels": job["max_pixels"], "scaled_decode": job["scaled_decode"], "on_size": on_size}
    nothing = np.empty(0, np.uint8)
    try:
        if "region" in job:
            pixels, region = upright_photo(data, Region(*job["region"]), job["size"], **bounds)
        else:
            picture = model_input(data, PreprocessConfig.model_validate(job["config"]), **bounds)
            pixels, region = picture.pixels, picture.region
    except _TooMuch:
        return TOO_MUCH, b"", nothing
    except ImageError as error:
        if capped and isinstance(error, InvalidImage):  # most codecs do not say that it was memory that failed them
            error = ImageTooCostly(f"in the memory that is allowed, {error}")
        return 2 + ERRORS.index(type(error)), str(error).encode(errors="replace")[:1000], nothing
    except MemoryError:
        return 2 + ERRORS.index(ImageTooCostly), b"the picture takes more memory than is allowed", nothing
    facts = {"shape": pixels.shape, "region": region, "seconds": time.perf_counter() - started}
    return DONE, json.dumps(facts).encode(), np.ascontiguousarray(pixels)


class _TooMuch(Exception):
    """The picture declares more pixels than a quick job may have."""


def _is_closed(service: socket.socket) -> bool:
    """Return whether the service has given the job up."""
    try:
        return not service.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _receive(service: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, received = memoryview(data), 0
    while received < size:
        count = service.recv_into(view[received:])
        if count == 0:
            os._exit(0)  # the service has given the job up
        received += count
    return data


def _address_space() -> int:
    """Return the bytes of address space of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_memory(base: int, more: int) -> None:
    """Let the process have `base` + `more` bytes of address space."""
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = base + more if hard == resource.RLIM_INFINITY else min(base + more, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _isolate() -> bool:
    """Give up files, network, programs and other processes; return whether the kernel agreed."""
    if sys.platform != "linux" or platform.machine() not in _FILTERS:
        return False
    architecture, numbers = _FILTERS[platform.machine()]
    denied = [int(each) for each in numbers.split()]
    load, jump, jump_if_not_below, end = 0x20, 0x15, 0x35, 0x06
    allow, refuse = 0x7FFF_0000, 0x0005_0001  # EPERM
    # What each instruction does, how many it skips if it holds and if not, and its constant.
    program = [
        (load, 0, 0, 4),
        (jump, 0, len(denied) + 3, architecture),
        (load, 0, 0, 0),
        (jump_if_not_below, len(denied) + 1, 0, 0x4000_0000),  # calls with pointers of 32 bits
        *((jump, len(denied) - place, 0, number) for place, number in enumerate(denied)),
        (end, 0, 0, allow),
        (end, 0, 0, refuse),
    ]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in program))
    packed = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(instructions)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    prctl(1, signal.SIGKILL, 0, 0, 0)  # with the service, even while it is stopped
    no_new_privileges, set_filter = (38, 1, 0, 0, 0), (22, 2, ctypes.addressof(packed), 0, 0)
    return bool(prctl(*no_new_privileges) == 0 and prctl(*set_filter) == 0)
