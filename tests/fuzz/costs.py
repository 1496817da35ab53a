"""Pictures of hostile structure, sent one by one; what costs too much processor time or memory is a fault."""

from __future__ import annotations

import http.client
import io
import itertools
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from PIL import Image

from benchmarks.process_tree import ProcessTree
from tests.fuzz.mutation import case
from tests.fuzz.structures import MAKERS
from tests.fuzz.tally import Tally
from tests.launcher import ServerProcess
from tests.model.images.test_hostile_images import valid_files

KIND: Final = "structures"
MAX_SECONDS: Final = 2.5
"""Of processor time for one file, over all processes of the service."""
MAX_GROWTH: Final = 450 << 20
"""Bytes of memory for one file: a picture of `VIT_MAX_IMAGE_PIXELS` takes 427 MiB while it is decoded."""

SPARE_GROWTH: Final = 128 << 20
PIXEL_GROWTH: Final = 16
"""Bytes of memory that a file may take beside those for each pixel that its header declares."""
SPARE_SECONDS: Final = 0.2
PIXEL_SECONDS: Final = {"jpeg": 3e-8, "gif": 3e-8}
"""Of an accepted file; beyond it and some time for each pixel it is noted as amplified, which is no fault."""
_OTHER_PIXEL_SECONDS = 8e-8

_PATIENCE = 40.0
"""Seconds for an answer and the work that goes on behind it; who works for longer is ended."""
_IDLE = 0.4
"""Seconds with less than a tenth of a core are the end of the work."""


def files(seed: int, samples: Path) -> Iterator[tuple[str, bytes]]:
    """Return names of makers and their files without an end, after the files of the folder where there is one."""
    for path in sorted(samples.glob("*.*")):
        if path.suffix != ".md":
            yield path.name, path.read_bytes()
    for number, name in enumerate(itertools.cycle(MAKERS)):
        yield name, MAKERS[name](case(seed, KIND, number))


def send(
    start: Callable[[], ServerProcess],
    seed: int,
    samples: Path,
    out: Path,
    *,
    seconds: float = math.inf,
    cases: int | None = None,
    max_seconds: float = MAX_SECONDS,
    max_growth: int = MAX_GROWTH,
) -> Tally:
    """Send files for `seconds`, or so many `cases`, to a server of their own; keep those beyond the bounds in `out`.

    A server that is still at work after `_PATIENCE` is killed, and another one is started for the next file.
    """
    tally, end, server = Tally(KIND), time.monotonic() + seconds, _warm(start())
    sent, beyond = Counter[str](), Counter[str]()
    try:
        for number, (name, data) in enumerate(itertools.islice(files(seed, samples), cases)):
            if time.monotonic() > end:
                break
            tally.sent += 1
            sent[name] += 1
            tree = ProcessTree(server.process.pid)
            before = tree.processor_seconds()
            with tree.growth() as growth:
                status = _post(server, data)
                is_idle = _wait_until_idle(tree)
            used = tree.processor_seconds() - before
            good = tally.answered(status, f"{number} ({name})") if status else not is_idle
            if not status and is_idle:
                tally.lose(f"{number} ({name})", "no answer")
            pixels = declared_pixels(data)
            bound = min(max_growth, SPARE_GROWTH + PIXEL_GROWTH * pixels)
            tally.seconds, tally.peak = max(tally.seconds, used), max(tally.peak, growth.bytes)
            if used > max_seconds or growth.bytes > bound:
                good = False
                beyond[name] += 1
                cost = f"{used:.2f}{'' if is_idle else ' and more'} CPU-s, {growth.bytes / 2**20:+.0f} MiB"
                cost = f"{pixels / 1e6:.1f} Mpx: {cost}"
                tally.faults.append(f"{KIND} {number} ({name}), {len(data)} bytes, answered {status or 'not'}, {cost}")
            elif status == 200 and used > SPARE_SECONDS + pixels * PIXEL_SECONDS.get(name[:4], _OTHER_PIXEL_SECONDS):
                tally.notes.append(
                    f"{KIND} {number} ({name}): {used:.2f} CPU-s for {pixels / 1e6:.1f} Mpx, {len(data)} bytes"
                )
            if not good:
                (out / f"{KIND}-{seed}-{number}-{name.replace(' ', '_')}").write_bytes(data)
            if not is_idle or server.process.poll() is not None:
                server.kill()
                server = _warm(start())
    finally:
        server.kill()
    if beyond:
        each = ", ".join(f"{name} {count} of {sent[name]}" for name, count in beyond.items())
        tally.faults.insert(0, f"{KIND} beyond {max_seconds:g} CPU-s or their memory: {each}")
    return tally


def declared_pixels(data: bytes) -> int:
    """Return the pixels that a file's header declares, 0 where it has none that can be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                return math.prod(image.size)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return 0


def _warm(server: ServerProcess) -> ServerProcess:
    """Send a plain picture of each format: what is started and allocated once is nobody's cost."""
    for data in valid_files():
        _post(server, data)
    _wait_until_idle(ProcessTree(server.process.pid))
    return server


def _post(server: ServerProcess, data: bytes) -> int:
    """Return the status, 0 where no answer comes in time."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=_PATIENCE)
    try:
        connection.request("POST", "/classify", data, {"Content-Type": "application/octet-stream"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _wait_until_idle(tree: ProcessTree) -> bool:
    end, used = time.monotonic() + _PATIENCE, tree.processor_seconds()
    while time.monotonic() < end:
        time.sleep(_IDLE)
        last, used = used, tree.processor_seconds()
        if used - last < 0.1 * _IDLE:
            return True
    return False
