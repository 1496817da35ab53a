"""A process that decodes what may take long or break a decoder: each file costs nobody but its
sender.

    service --job--> decoder --answer--> service

A decoder has

* no keys and no model: its environment is empty, and nothing of the service was ever in its memory;
* a limit of address space, set at its start, and of processor time for each job;
* no network, no files, no other programs and no signals to others, where libseccomp's Python binding is installed
  (`seccomp` of the system, or `pyseccomp`).

A job is a header in JSON and the file; an answer is a status, JSON and pixels. Neither side
unpickles anything, as the other may be in the hands of whoever wrote the picture.
"""

import errno
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image, ImageCms, ImageColor, ImageFilter, ImageOps, ImagePalette

from model.config import PreprocessConfig
from model.errors import (
    ImageError,
    ImageTooCostly,
    ImageTooLarge,
    InvalidImage,
    UnsupportedImageFormat,
)
from model.images.preprocess import Region, model_input, upright_photo

if sys.platform != "win32":  # where the service imports this module and starts no process
    import resource

# Bytes of the header and of the file.
JOB: Final = struct.Struct("<II")

# Status, bytes of the JSON and of the pixels.
ANSWER: Final = struct.Struct("<BII")

# What a decoder sends first: whether only limits hold it, or also a filter of system calls.
LIMITED: Final = b"limits"
CONFINED: Final = b"kernel"

DONE: Final = 0
# Statuses from 1 on.
ERRORS: Final = (UnsupportedImageFormat, ImageTooLarge, ImageTooCostly, InvalidImage)

# Modules that Pillow imports when a picture needs them, which a decoder no longer can.
_IMPORTED_LATE: Final = (ImageCms, ImageColor, ImageFilter, ImageOps, ImagePalette)

# System calls that decoding needs, beside those that begin a thread, as libde265 does; any other
# fails with EPERM.
_ALLOWED_CALLS: Final = (
    *(
        "read",
        "write",
        "recvfrom",
        "recvmsg",
        "sendto",
        "sendmsg",
        "poll",
        "ppoll",
        "close",
        "lseek",
        "fstat",
    ),
    *(
        "mmap",
        "munmap",
        "mremap",
        "mprotect",
        "madvise",
        "brk",
        "futex",
        "membarrier",
        "rseq",
        "set_robust_list",
    ),
    *(
        "rt_sigaction",
        "rt_sigprocmask",
        "rt_sigreturn",
        "sigaltstack",
        "restart_syscall",
        "setitimer",
    ),
    *(
        "clock_gettime",
        "clock_nanosleep",
        "gettimeofday",
        "getrandom",
        "getpid",
        "gettid",
        "sched_yield",
    ),
    *("exit", "exit_group"),
)

# Flag of clone(2): a thread of this process, and not another process.
_CLONE_THREAD: Final = 0x10000


def main() -> None:
    """Run a decoder on the socket that is file descriptor 0: answer jobs in turn, until it is
    closed.

    The one argument is the bounds in JSON: `max_pixels`, `scaled_decode`, `seconds` of processor
    time for a job and `max_bytes` of address space beside that of the empty process.
    """
    bounds: dict[str, Any] = json.loads(sys.argv[1])
    service = socket.socket(fileno=0)
    os.dup2(1, 2)  # what codecs print goes where standard output goes: nowhere
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = -(-bounds["max_pixels"] // 2)  # Pillow refuses more than twice as many
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    if "pillow_heif" in sys.modules:
        sys.modules["pillow_heif"].options.DECODE_THREADS = 1
    seconds = bounds.pop("seconds")
    _limit_memory(bounds.pop("max_bytes"))
    service.sendall(CONFINED if _confine() else LIMITED)
    while head := service.recv(JOB.size, socket.MSG_WAITALL):
        header_bytes, file_bytes = JOB.unpack(head)
        job: dict[str, Any] = json.loads(_receive(service, header_bytes))
        data = _receive(service, file_bytes)
        signal.setitimer(
            signal.ITIMER_PROF, seconds
        )  # it ends the process, wherever that is in a codec
        status, text, pixels = _answer(job, data, bounds)
        signal.setitimer(signal.ITIMER_PROF, 0)
        service.sendall(ANSWER.pack(status, len(text), pixels.nbytes) + text)
        service.sendall(pixels.data.cast("B") if pixels.nbytes else b"")


def _answer(
    job: dict[str, Any], data: bytearray, bounds: dict[str, Any]
) -> tuple[int, bytes, NDArray[np.uint8]]:
    """Return the status, JSON and pixels of the answer to a job."""
    started, nothing = time.perf_counter(), np.empty(0, np.uint8)
    try:
        if "region" in job:
            pixels, region = upright_photo(data, Region(*job["region"]), job["size"], **bounds)
        else:
            picture = model_input(data, PreprocessConfig.model_validate(job["config"]), **bounds)
            pixels, region = picture.pixels, picture.region
    except ImageError as error:
        return 1 + ERRORS.index(type(error)), str(error).encode(errors="replace")[:1000], nothing
    except MemoryError:
        return (
            1 + ERRORS.index(ImageTooCostly),
            b"the picture takes more memory than is allowed",
            nothing,
        )
    facts = {"shape": pixels.shape, "region": region, "seconds": time.perf_counter() - started}
    return DONE, json.dumps(facts).encode(), np.ascontiguousarray(pixels)


def _receive(service: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    if size and service.recv_into(data, flags=socket.MSG_WAITALL) < size:
        sys.exit()  # the service has given the job up
    return data


def _limit_memory(more: int) -> None:
    """Let the process have `more` bytes of address space than it has now."""
    if sys.platform == "linux":
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _confine() -> bool:
    """Give up files, network, programs and other processes; return whether the kernel agreed."""
    for name in ("seccomp", "pyseccomp"):
        try:
            seccomp = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):  # not installed, or without libseccomp
            continue
        try:
            calls = seccomp.SyscallFilter(seccomp.ERRNO(1))  # EPERM
            for call in _ALLOWED_CALLS:
                calls.add_rule(seccomp.ALLOW, call)
            calls.add_rule(
                seccomp.ALLOW,
                "clone",
                seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD),
            )
            calls.add_rule(
                seccomp.ERRNO(errno.ENOSYS), "clone3"
            )  # its flags lie in memory; libc then takes clone
            calls.load()
        except (
            OSError,
            RuntimeError,
            ValueError,
        ):  # a kernel without filters, or a library without a name
            return False
        return True
    return False


if __name__ == "__main__":
    main()
