"""Processes with bounded time, memory and rights decode files: a bad file fails alone."""

import asyncio
import functools
import importlib
import io
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from model.config import PreprocessConfig
from model.errors import ImageTooCostly, ImageTooLarge, InvalidImage, UnsupportedImageFormat
from model.images.decode import is_bounded
from model.images.decoder_process import ANSWER, CONFINED
from model.images.formats import SUPPORTED_FORMATS
from model.images.preprocess import model_input, upright_photo
from service.errors import DeadlineExceeded, EngineUnavailable
from service.settings import load_settings
from service.web.decoders import PIXEL_BYTES, Decoders
from service.web.lanes import Deadline
from tests.launcher import command_line
from tests.model.images.pictures import FORMATS, black_png, config, encode, noise, png_chunk, scene
from tests.service.fakes import on_a_loop, until
from tests.service.web.apps import App, form

pytestmark = pytest.mark.timeout(60)

CONFIG = config()


earlier: set[int] = set()
"""Decoder processes of earlier tests, which may still end."""


@pytest.fixture(autouse=True)
def only_processes_of_this_test() -> None:
    earlier.clear()
    earlier.update(children())


def children() -> list[int]:
    """Return the test's decoder processes of all threads, without those that end meanwhile."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if pid not in earlier and b"decoder_process" in command_line(pid)]


def is_slow() -> bool:
    """Return whether a decoder leaves the processor to other processes."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(ProcessLookupError):
        return any(os.getpriority(os.PRIO_PROCESS, each) > own for each in children())
    return False


class Pool(Decoders):
    """Return decoders that count their restarts."""

    def __init__(self, pixel_bytes: float = PIXEL_BYTES, **settings: Any) -> None:
        self.restarts = 0
        super().__init__(load_settings(settings), on_restart=self._count, pixel_bytes=pixel_bytes)

    def _count(self) -> None:
        self.restarts += 1

    async def decode(
        self, data: bytes, seconds: float = 50, wanted: PreprocessConfig = CONFIG
    ) -> np.ndarray:
        found = await self.model_input(
            bytearray(data), wanted, Deadline(time.monotonic() + seconds)
        )
        return found.picture.pixels


@asynccontextmanager
async def pool(**options: Any) -> AsyncIterator[Pool]:
    made = Pool(**options)
    try:
        yield made
    finally:
        made.close()


def tiff_of_tiles(tiles: int) -> bytes:
    """Return a TIFF of one column with a tile of 25 million pixels per 16 pixels: 0.05 s each."""
    tile = zlib.compress(bytes(1_600_000 * 16), 9)
    places = 8 + 2 + 9 * 12 + 4
    first = places + 8 * tiles
    fields = [
        (256, 1),
        (257, 16 * tiles),
        (258, 8),
        (259, 8),
        (262, 1),
        (322, 1_600_000),
        (323, 16),
    ]
    entries = [struct.pack("<HHLL", tag, 4, 1, value) for tag, value in fields]
    entries += [
        struct.pack("<HHLL", tag, 4, tiles, places + 4 * tiles * (tag == 325)) for tag in (324, 325)
    ]
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", 9) + b"".join(entries) + bytes(4)
    offsets = [first + number * len(tile) for number in range(tiles)]
    return head + struct.pack(f"<{2 * tiles}L", *offsets, *[len(tile)] * tiles) + tile * tiles


@functools.cache
def costly_picture() -> bytes:
    return tiff_of_tiles(240)


@on_a_loop
async def test_processes_decode_like_the_service() -> None:
    image = scene(500, 400)
    if "HEIF" in SUPPORTED_FORMATS:
        importlib.import_module("pillow_heif").register_heif_opener()  # it encodes, too
    async with pool() as decoders:
        for name in [*FORMATS, *({"HEIF"} & {*SUPPORTED_FORMATS})]:  # HEIF's library starts threads
            data = encode(
                image,
                name,
                **({"orientation": 6} if name in ("JPEG", "PNG", "WEBP", "TIFF") else {}),
            )
            got = (
                await decoders.model_input(bytearray(data), CONFIG, Deadline(time.monotonic() + 50))
            ).picture
            expected = model_input(data, CONFIG)
            assert np.array_equal(got.pixels, expected.pixels), name
            assert (got.region, got.pixels.flags.writeable) == (expected.region, True)
            late = Deadline(time.monotonic() + 50)
            photo = (await decoders.photo(bytearray(data), expected.region, 300, late)).picture
            pixels, region = upright_photo(data, expected.region, 300)
            assert np.array_equal(photo.pixels, pixels), name
            assert photo.region == region
        for mode in ("L", "P", "LA", "RGBA", "CMYK", "I;16", "I", "F", "1", "YCbCr", "LAB"):
            data = encode(Image.new(mode, (40, 30)), "TIFF")
            assert np.array_equal(await decoders.decode(data), model_input(data, CONFIG).pixels), (
                mode
            )
        assert decoders.restarts == 0


@on_a_loop
async def test_bad_picture_keeps_its_process() -> None:
    async with pool(max_image_pixels=10_000) as decoders:
        whole = encode(noise(64, 48), "GIF")
        for data, error in (
            (b"no picture", UnsupportedImageFormat),
            (whole[:800], InvalidImage),
            (encode(noise(128, 100), "WEBP"), ImageTooLarge),
        ):
            with pytest.raises(error):
                await decoders.decode(data)
        [process] = children()
        assert (await decoders.decode(whole)).shape == (32, 32, 3)
        assert (decoders.restarts, children()) == (0, [process])


@on_a_loop
async def test_slow_picture_gets_lower_priority() -> None:
    async with pool() as decoders:
        honest = encode(noise(64, 48), "WEBP")
        await decoders.decode(honest)
        costly = asyncio.create_task(decoders.decode(costly_picture()))
        await until(is_slow)
        assert (await decoders.decode(honest)).shape == (32, 32, 3)
        assert not costly.done()
        costly.cancel()


@on_a_loop
async def test_memory_limit_refuses_a_picture() -> None:
    data = encode(Image.new("RGB", (4000, 3000)), "WEBP")
    limits = {"max_image_pixels": 12_000_000, "max_upload_bytes": len(data)}
    async with pool(pixel_bytes=1, **limits) as decoders:
        with pytest.raises((ImageTooCostly, InvalidImage), match="smaller picture, or a JPEG"):
            await decoders.decode(data)
        assert (await decoders.decode(encode(noise(64, 48), "WEBP"))).shape == (32, 32, 3)


@on_a_loop
async def test_killed_decoder_is_replaced() -> None:
    data = encode(noise(64, 48), "WEBP")
    async with pool() as decoders:
        await decoders.decode(data)
        os.kill(children()[0], signal.SIGKILL)
        assert (await decoders.decode(data)).shape == (32, 32, 3)
        assert decoders.restarts == 1
        costly = asyncio.create_task(decoders.decode(costly_picture()))
        for _ in range(2):  # a file that kills two processes is not tried again
            seen = decoders.restarts
            await until(is_slow)
            os.kill(children()[0], signal.SIGKILL)
            await until(lambda: decoders.restarts > seen)  # noqa: B023
        with pytest.raises(InvalidImage, match="twice"):
            await costly


@on_a_loop
async def test_crashed_decoder_refuses_its_picture() -> None:
    async with pool() as decoders:
        await decoders.decode(encode(noise(64, 48), "WEBP"))
        os.kill(children()[0], signal.SIGSEGV)
        with pytest.raises(InvalidImage, match="crashed"):
            await decoders.decode(encode(noise(64, 48), "WEBP"))


@on_a_loop
async def test_disconnect_ends_the_decoder() -> None:
    waiting = patch.object(
        subprocess.Popen, "wait", autospec=True, side_effect=subprocess.Popen.wait
    )
    async with pool() as decoders:
        with waiting as wait, pytest.raises(DeadlineExceeded):
            await decoders.decode(costly_picture(), seconds=1)
        assert children() == []
        assert [each.args[1:] for each in wait.call_args_list] == [(0.0,), ()], (
            "it is killed at once"
        )


@on_a_loop
async def test_decoder_process_knows_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VIT_API_KEYS", "secret-key")
    async with pool() as decoders:
        await decoders.decode(encode(noise(64, 48), "WEBP"))
        [child] = children()
        environment = Path(f"/proc/{child}/environ").read_bytes()
    assert b"VIT_" not in environment
    assert children() == []


@on_a_loop
async def test_missing_interpreter_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with pool() as decoders:
        with pytest.raises(EngineUnavailable, match="cannot be started"):
            await decoders.decode(encode(noise(64, 48), "WEBP"))


def test_lower_memory_limit_is_kept() -> None:
    script = """from model.images import decoder_process as program
program._limit_memory(1 << 60)
print(program.resource.getrlimit(program.resource.RLIMIT_AS))"""
    limited = f"ulimit -v 8388608; exec {sys.executable} -c '{script}'"
    done = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, check=True)
    assert done.stdout == f"({1 << 33}, {1 << 33})\n"


CONFINED_ATTEMPTS = """
import os, socket, sys
from pathlib import Path
from model.images import decoder_process
attempts = {
    "open('/tmp/written', 'w')": lambda: open("/tmp/written", "w"),
    "open('/proc/self/environ')": lambda: open("/proc/self/environ"),
    "socket.socket()": socket.socket,
    "os.execv('/bin/true', ['true'])": lambda: os.execv("/bin/true", ["true"]),
    "os.kill(os.getppid(), 0)": lambda: os.kill(os.getppid(), 0),
    "os.fork()": lambda: os.fork() or os._exit(0),
    "os.sched_setaffinity(0, {0})": lambda: os.sched_setaffinity(0, {0}),
}
assert decoder_process._confine()
for name, attempt in attempts.items():
    try:
        attempt()
    except PermissionError:
        continue
    print(name, flush=True)
print("done")
"""


def test_confined_process_reaches_nothing() -> None:
    pytest.importorskip(
        "seccomp" if _has("seccomp") else "pyseccomp",
        reason="libseccomp's binding is not installed",
    )
    done = subprocess.run(
        [sys.executable, "-c", CONFINED_ATTEMPTS], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def _has(name: str) -> bool:
    return (
        subprocess.run(
            [sys.executable, "-c", f"import {name}"], capture_output=True, check=False
        ).returncode
        == 0
    )


@on_a_loop
@pytest.mark.parametrize(
    ("status", "text", "pixels"),
    [
        (0, b"no json", b""),
        (0, b'{"shape": [1, 1, 3], "region": [0, 0, 1, 1], "seconds": 1}', b"ab"),
        (0, b'{"shape": [2, 2, 3], "region": [0, 0, 1, 1], "seconds": 1}', bytes(12)),
        (0, b'{"shape": [1, 1, 3], "region": [0, 0, 1, Infinity], "seconds": 1}', b"abc"),
        (0, b"[]", b"abc"),
        (9, b"", b""),
        (0, bytes(5000), b""),
    ],
)
async def test_a_bad_decoder_answer_is_refused(
    status: int, text: bytes, pixels: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = CONFINED + ANSWER.pack(status, len(text), len(pixels)) + text + pixels
    program = tmp_path / "hostile"
    program.write_text(
        f"#!{sys.executable}\n"
        "import socket\n"
        "service = socket.socket(fileno=0)\n"
        f"service.sendall({answer!r})\n"
        "service.recv(1)\n"
        "input_ = service.recv(1 << 16)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    async with pool() as decoders:
        with pytest.raises(InvalidImage, match="crashed"):
            await decoders.decode(b"x", wanted=config((1, 1)))
        assert decoders.restarts == 1


# Through the service


def test_unbounded_formats_use_a_process() -> None:
    progressive = encode(noise(64, 48), "JPEG", progressive=True)
    plain = encode(noise(64, 48), "JPEG")
    assert (
        is_bounded(plain) and is_bounded(encode(noise(64, 48), "PNG")) and is_bounded(b"no picture")
    )
    assert not any(
        is_bounded(encode(scene(), name)) for name in ("WEBP", "GIF", "BMP", "TIFF", "AVIF")
    )
    assert not is_bounded(progressive)
    assert not is_bounded(plain.replace(b"\xff\xc0", b"\xff\xc3"))  # lossless
    assert not is_bounded(plain[:2] + b"\xff" * 100 + plain[2:])
    assert not is_bounded(plain[:2] + b"\xff\xfe\0\2" * 300 + plain[2:])
    scan = plain.index(b"\xff\xda\0\x0c\3")
    assert not is_bounded(plain[: scan + 4] + b"\1" + plain[scan + 5 :])  # of several scans
    at = plain.index(b"\xff\xc0") + 5
    for side, expected in ((5099, True), (5100, False)):
        assert is_bounded(plain[:at] + struct.pack(">HH", side, 5099) + plain[at + 4 :]) == expected
    assert is_bounded(black_png(4096, 4096)) and not is_bounded(black_png(4096, 4097))
    for png in (
        black_png(2100, 2000, colour_type=6),
        black_png(2100, 2000, bits=16, colour_type=4),
    ):
        assert not is_bounded(png)
    png = encode(noise(64, 48), "PNG")
    end = png.index(b"IDAT") - 4
    assert is_bounded(png[:end] + png_chunk(b"IDAT", b"") * 1000 + png[end:])
    assert not is_bounded(png[:end] + png_chunk(b"IDAT", b"") * 1100 + png[end:])


@on_a_loop
async def test_a_costly_picture_is_422(service: App) -> None:
    answer = await service.classify(costly_picture())
    assert (answer.status, answer.code) == (422, "image_too_costly")
    assert "more than 2 s of a processor: send a smaller picture" in answer.json["detail"]
    assert service.metric("vit_decoder_restarts_total") == 1
    assert service.metric("vit_rejected_total", reason="image_too_costly") == 1
    webp = encode(noise(64, 48), "WEBP")
    answer = await service.classify(webp)
    assert answer.status == 200
    assert answer.json["timings_ms"]["decode"] > 0
    query = "view=photo&size=300&caption=false"
    photo = await service.request("POST", "/attention", query=query, **form(webp))
    assert (photo.status, Image.open(io.BytesIO(photo.content)).size) == (200, (300, 225))


@on_a_loop
async def test_libraries_do_not_print_into_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    encoded = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(encoded, "TIFF", compression="tiff_lzw")
    damaged = encoded.getvalue()[:200] + b"\xff" * 200 + encoded.getvalue()[400:]
    async with pool() as decoders:
        with pytest.raises(InvalidImage):
            await decoders.decode(damaged)
    assert capfd.readouterr().err == ""
