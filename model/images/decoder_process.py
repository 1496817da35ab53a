"""A separate process that decodes files that may take long or may break a decoder.

    service --job--> decoder --answer--> service

A bad file affects only its sender. A decoder process has

* an empty environment, no keys and no model in its memory;
* a limit on its address space, set at the start, and on the processor time of each job;
* no access to network, files, other programs or other processes, if a Python binding of libseccomp
  is installed (`seccomp` of the system, or `pyseccomp`).

A job is a header in JSON and the file. An answer is a status, JSON and pixels. Neither side
unpickles data, because the author of a picture may control the other side.
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
    SMALLER_PICTURE,
    ImageError,
    ImageTooCostly,
    ImageTooLarge,
    InvalidImage,
    UnsupportedImageFormat,
)
from model.images.preprocess import Region, model_input, upright_photo

if sys.platform != "win32":  # on Windows, the service imports this module but starts no process
    import resource

# Sizes in bytes of the header and of the file.
JOB: Final = struct.Struct("<II")

# Status, and sizes in bytes of the JSON and of the pixels.
ANSWER: Final = struct.Struct("<BII")

# First message of a decoder: only limits confine it, or also a filter of system calls.
LIMITED: Final = b"limits"
CONFINED: Final = b"kernel"

DONE: Final = 0
# Errors of the statuses 1, 2, ...
ERRORS: Final = (UnsupportedImageFormat, ImageTooLarge, ImageTooCostly, InvalidImage)

# Pillow imports these modules on demand, which a confined decoder cannot do.
_IMPORTED_LATE: Final = (ImageCms, ImageColor, ImageFilter, ImageOps, ImagePalette)

# System calls that decoding needs. A clone that starts a thread is also allowed, because libde265
# uses threads. All other calls fail with EPERM.
_ALLOWED_CALLS: Final = """
    read write recvfrom recvmsg sendto sendmsg poll ppoll close lseek fstat
    mmap munmap mremap mprotect madvise brk futex membarrier rseq set_robust_list
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall setitimer
    clock_gettime clock_nanosleep gettimeofday getrandom getpid gettid sched_yield
    exit exit_group
"""

# Flag of clone(2) for a thread of this process instead of another process.
_CLONE_THREAD: Final = 0x10000


def main() -> None:
    """Answer jobs in turn on the socket at file descriptor 0, until the socket is closed.

    The one argument is the bounds in JSON: `max_pixels`, `scaled_decode`, `seconds` of processor
    time per job, and `max_bytes` of address space above the empty process.
    """
    bounds: dict[str, Any] = json.loads(sys.argv[1])
    service = socket.socket(fileno=0)
    os.dup2(1, 2)  # send messages of codecs to standard output, which is /dev/null
    warnings.simplefilter("ignore")
    # Pillow refuses more than twice this number.
    Image.MAX_IMAGE_PIXELS = -(-bounds["max_pixels"] // 2)
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
        # The timer ends the process even inside a codec.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        status, text, pixels = _answer(job, data, bounds)
        signal.setitimer(signal.ITIMER_PROF, 0)
        service.sendall(ANSWER.pack(status, len(text), pixels.nbytes) + text)
        service.sendall(pixels.data.cast("B") if pixels.nbytes else b"")


def _answer(
    job: dict[str, Any], data: bytearray, bounds: dict[str, Any]
) -> tuple[int, bytes, NDArray[np.uint8]]:
    """Return the status, JSON and pixels of the answer to a job."""
    started = time.perf_counter()
    try:
        if "region" in job:
            pixels, region = upright_photo(data, Region(*job["region"]), job["size"], **bounds)
        else:
            picture = model_input(data, PreprocessConfig.model_validate(job["config"]), **bounds)
            pixels = picture.pixels
            region = picture.region
    except ImageError as error:
        return _refusal(error)
    except MemoryError:
        return _refusal(
            ImageTooCostly(f"the picture takes more memory than is allowed: {SMALLER_PICTURE}")
        )
    facts = {"shape": pixels.shape, "region": region, "seconds": time.perf_counter() - started}
    return DONE, json.dumps(facts).encode(), np.ascontiguousarray(pixels)


def _refusal(error: ImageError) -> tuple[int, bytes, NDArray[np.uint8]]:
    """Return the status, message and empty pixels of a refused picture."""
    status = 1 + ERRORS.index(type(error))
    return status, str(error).encode(errors="replace")[:1000], np.empty(0, np.uint8)


def _receive(service: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    if size and service.recv_into(data, flags=socket.MSG_WAITALL) < size:
        sys.exit()  # the service has dropped the job
    return data


def _limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes above its current size."""
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
        except (ImportError, OSError, RuntimeError):  # the binding or libseccomp is missing
            continue
        try:
            calls = seccomp.SyscallFilter(seccomp.ERRNO(1))  # EPERM
            for call in _ALLOWED_CALLS.split():
                calls.add_rule(seccomp.ALLOW, call)
            is_thread = seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD)
            calls.add_rule(seccomp.ALLOW, "clone", is_thread)
            # A filter cannot read the flags of clone3. After ENOSYS, libc uses clone.
            calls.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
            calls.load()
        except (OSError, RuntimeError, ValueError):  # no filters in this kernel, or unknown calls
            return False
        return True
    return False


if __name__ == "__main__":
    main()
