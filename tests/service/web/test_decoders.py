"""Decoder processes: what they may do, what ends them, and that nobody but the sender of a costly file notices."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import struct
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model.config import PreprocessConfig
from model.errors import ImageTooCostly, ImageTooLarge, InvalidImage, UnsupportedImageFormat
from model.images.decoder_process import ANSWER, ERRORS, _is_closed, _isolate
from model.images.formats import UnboundedWork, unpack
from model.images.preprocess import model_input, upright_photo
from service.errors import DeadlineExceeded, EngineUnavailable
from service.settings import load_settings
from service.web import decoders as module
from service.web.decoders import Decoders, _answer
from service.web.lanes import Deadline
from tests.model.images.pictures import FORMATS, black_png, config, encode, noise, png_chunk, scene
from tests.service.fakes import PATIENCE, on_a_loop
from tests.service.web.apps import app, form, until

pytestmark = pytest.mark.timeout(60)

CONFIG = config()


def read(path: Path) -> bytes:
    """What a file of the system says; nothing once its process or thread has ended."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def children(parent: int) -> list[int]:
    """The processes that any thread of this one has started."""
    tasks = Path(f"/proc/{parent}/task").iterdir()
    return [int(pid) for task in tasks for pid in read(task / "children").split()]


def templates() -> set[int]:
    """The processes of this one that others are forked from to decode."""
    return {pid for pid in children(os.getpid()) if b"decoder_process" in read(Path(f"/proc/{pid}/cmdline"))}


class Pool(Decoders):
    """Decoders that count their restarts, and know their processes."""

    def __init__(self, quick: int = 2, **settings: Any) -> None:
        self.restarts = 0
        self._others = templates()
        super().__init__(load_settings(settings), quick=quick, on_restart=self._count)

    def _count(self) -> None:
        self.restarts += 1

    @property
    def template(self) -> int:
        [pid] = templates() - self._others
        return pid

    @property
    def processes(self) -> list[int]:
        return children(self.template)

    async def decode(self, data: bytes, seconds: float = 50, wanted: PreprocessConfig = CONFIG) -> np.ndarray:
        found = await self.model_input(bytearray(data), wanted, Deadline(time.monotonic() + seconds))
        return found.picture.pixels


@asynccontextmanager
async def pool(**options: Any) -> AsyncIterator[Pool]:
    made = Pool(**options)
    try:
        yield made
    finally:
        made.close()


def tiff_of_tiles(tiles: int) -> bytes:
    """A TIFF of one column, each 16 pixels of which stand in a tile of 25 million: 0.05 s each."""
    tile = zlib.compress(bytes(1_600_000 * 16), 9)
    places = 8 + 2 + 9 * 12 + 4
    first = places + 8 * tiles
    fields = [(256, 1), (257, 16 * tiles), (258, 8), (259, 8), (262, 1), (322, 1_600_000), (323, 16)]
    entries = [struct.pack("<HHLL", tag, 4, 1, value) for tag, value in fields]
    entries += [struct.pack("<HHLL", tag, 4, tiles, places + 4 * tiles * (tag == 325)) for tag in (324, 325)]
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", 9) + b"".join(entries) + bytes(4)
    offsets = [first + number * len(tile) for number in range(tiles)]
    return head + struct.pack(f"<{2 * tiles}L", *offsets, *[len(tile)] * tiles) + tile * tiles


COSTLY = tiff_of_tiles(100)


@on_a_loop
async def test_every_format_comes_back_as_if_it_were_decoded_here() -> None:
    image = scene(500, 400)
    async with pool() as decoders:
        for name in FORMATS:
            data = encode(image, name, **({"orientation": 6} if name in ("JPEG", "PNG", "WEBP", "TIFF") else {}))
            got = (await decoders.model_input(bytearray(data), CONFIG, Deadline(time.monotonic() + 50))).picture
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
            assert np.array_equal(await decoders.decode(data), model_input(data, CONFIG).pixels), mode
        assert decoders.restarts == 0


@on_a_loop
async def test_the_sender_is_told_what_is_wrong_and_the_process_is_kept() -> None:
    async with pool(max_image_pixels=10_000) as decoders:
        whole = encode(noise(64, 48), "GIF")
        for data, error in (
            (b"no picture", UnsupportedImageFormat),
            (whole[:800], InvalidImage),
            (encode(noise(128, 100), "WEBP"), ImageTooLarge),
        ):
            with pytest.raises(error):
                await decoders.decode(data)
        assert (await decoders.decode(whole)).shape == (32, 32, 3)
        assert (decoders.restarts, len(decoders.processes)) == (0, 1)


@on_a_loop
async def test_a_picture_that_takes_too_long_fails_and_keeps_nobody_waiting() -> None:
    async with pool(quick=1, decode_seconds=1) as decoders:
        honest = encode(noise(64, 48), "WEBP")
        await decoders.decode(honest)
        used = os.times()
        costly = asyncio.create_task(decoders.decode(COSTLY))
        await until(lambda: decoders.restarts == 1)  # no quick job after all
        assert (await decoders.decode(honest)).shape == (32, 32, 3)
        assert not costly.done()
        with pytest.raises(ImageTooCostly, match="more than 1 s"):
            await costly
        assert decoders.restarts == 2
        decoders.close()
        spent = os.times()
        assert spent.children_user + spent.children_system - used.children_user - used.children_system < 2.5


@on_a_loop
async def test_a_picture_whose_frame_is_larger_than_it_says_gets_no_memory() -> None:
    small = encode(Image.new("RGB", (64, 64)), "AVIF")
    large = encode(Image.new("RGB", (6000, 6000)), "AVIF", speed=10)
    at = large.index(b"ispe") + 8
    lie = large[:at] + small[small.index(b"ispe") + 8 :][:8] + large[at + 8 :]
    async with pool() as decoders:
        with pytest.raises(InvalidImage):
            await decoders.decode(lie)
        assert (await decoders.decode(small)).shape == (32, 32, 3)
        assert decoders.restarts == 0


@on_a_loop
async def test_a_picture_that_needs_more_memory_than_is_allowed_is_too_costly() -> None:
    data = encode(Image.new("RGB", (5000, 5000)), "WEBP")
    async with pool(max_image_pixels=25_000_000) as decoders:
        with pytest.raises(ImageTooCostly, match="memory"):
            await decoders.decode(data)


@on_a_loop
async def test_large_pictures_are_decoded_though_they_are_no_quick_job() -> None:
    async with pool() as decoders:
        assert (await decoders.decode(black_png(2100, 2100))).max() == 0
        await until(lambda: len(decoders.processes) == 1)  # the other was for this picture alone
        assert decoders.restarts == 0


@on_a_loop
async def test_a_decoder_or_the_template_that_was_killed_costs_nobody_a_picture() -> None:
    data = encode(noise(64, 48), "WEBP")
    async with pool(quick=1) as decoders:
        await decoders.decode(data)
        [pid] = decoders.processes
        os.kill(pid, signal.SIGSEGV)
        assert (await decoders.decode(data)).shape == (32, 32, 3)
        assert decoders.restarts == 1
        for pid in (*decoders.processes, decoders.template):
            with suppress(ProcessLookupError):  # one that was killed above may be reaped between these lines
                os.kill(pid, signal.SIGKILL)
        assert (await decoders.decode(data)).shape == (32, 32, 3)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@on_a_loop
async def test_a_caller_that_leaves_ends_the_process_in_the_middle_of_its_picture() -> None:
    async with pool(decode_seconds=60) as decoders:
        with pytest.raises(DeadlineExceeded):
            await decoders.decode(COSTLY * 1, seconds=1)
        await until(lambda: decoders.processes == [])


@on_a_loop
async def test_all_processes_end_with_the_pool() -> None:
    async with pool() as decoders:
        await decoders.decode(encode(noise(64, 48), "WEBP"))
        template, [child] = decoders.template, decoders.processes
        environment = Path(f"/proc/{child}/environ").read_bytes()
    assert b"VIT_" not in environment and b"PATH=" not in environment.replace(b"LD_LIBRARY_PATH=", b"")
    await until(lambda: not running(template) and not running(child))


@on_a_loop
async def test_a_service_whose_interpreter_does_not_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_START", "raise SystemExit(3)")
    async with pool() as decoders:
        with pytest.raises(EngineUnavailable, match="no process"):
            await decoders.decode(encode(noise(64, 48), "WEBP"))


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="no filter for this machine")
def test_an_isolated_process_has_no_files_no_network_no_programs_and_no_signals(tmp_path: Path) -> None:
    attempts = (
        lambda: (tmp_path / "written").write_text("a"),
        lambda: Path("/proc/self/environ").read_bytes(),
        socket.socket,
        lambda: os.execv("/bin/true", ["true"]),
        lambda: os.kill(os.getppid(), 0),
    )
    for attempt in attempts:
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                if _isolate():
                    attempt()
                    code = 1
            except PermissionError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    ("status", "text", "pixels"),
    [
        (0, b"no json", b""),
        (0, b'{"shape": [1, 1, 3], "region": [0, 0, 1, 1], "seconds": 1}', b"ab"),
        (0, b'{"shape": [2, 2, 3], "region": [0, 0, 1, 1], "seconds": 1}', bytes(12)),
        (0, b'{"shape": [1, 1, 3], "region": [0, 0, 1], "seconds": 1}', b"abc"),
        (0, b'{"shape": [1, 1, 3], "region": [0, 0, 1, Infinity], "seconds": 1}', b"abc"),
        (0, b'{"shape": [1, 1, 3], "region": [0, 0, 1, 1]}', b"abc"),
        (0, b"[]", b"abc"),
        (2 + len(ERRORS), b"", b""),
    ],
)
def test_an_answer_that_is_none_is_not_believed(status: int, text: bytes, pixels: bytes) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        _answer(status, bytearray(text), bytearray(pixels), lambda shape: shape == (1, 1, 3))


@on_a_loop
async def test_a_decoder_that_answers_what_it_should_not_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hostile(self: Decoders) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.sendall(ANSWER.pack(0, 1 << 31, 1 << 31))
        theirs.detach()
        return ours

    monkeypatch.setattr(Decoders, "_start", hostile)
    async with pool() as decoders:
        with pytest.raises(InvalidImage, match="crashed"):
            await decoders.decode(b"")
        assert decoders.restarts == 2


# Through the service


def bounded(data: bytes) -> bool:
    try:
        unpack(data, bounded=True)
    except UnboundedWork:
        return False
    return True


def test_only_what_its_structure_bounds_is_decoded_in_the_service() -> None:
    progressive = encode(noise(64, 48), "JPEG", progressive=True)
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    plain = encode(noise(64, 48), "JPEG")
    png = encode(noise(64, 48), "PNG")
    assert bounded(plain) and bounded(progressive) and bounded(png)
    assert not any(bounded(encode(scene(), name)) for name in ("WEBP", "GIF", "BMP", "TIFF", "AVIF"))
    assert not bounded(progressive[:-2] + scan * 1000 + progressive[-2:])
    assert not bounded(plain.replace(b"\xff\xc0", b"\xff\xc3"))  # lossless
    at = plain.index(b"\xff\xc0") + 5
    for side, expected in ((5099, True), (5100, False)):
        assert bounded(plain[:at] + struct.pack(">HH", side, 5099) + plain[at + 4 :]) == expected
    assert bounded(black_png(4096, 4096)) and not bounded(black_png(4096, 4097))
    assert not bounded(black_png(2100, 2000, colour_type=6)) and not bounded(
        black_png(2100, 2000, bits=16, colour_type=4)
    )
    parts = png_chunk(b"IDAT", b"") * 2048
    assert not bounded(png[:33] + parts + png[33:])
    narrow = encode(Image.new("L", (1, 60_000)), "JPEG", progressive=True)
    wide = narrow.replace(b"\x01\x01\x11\x00", b"\x01\x01\x44\x00")
    scans = narrow[narrow.rindex(b"\xff\xda") : -2] * 300
    assert bounded(narrow[:-2] + scans + narrow[-2:]) and not bounded(wide[:-2] + scans + wide[-2:])


@on_a_loop
async def test_a_costly_picture_is_422_and_counted() -> None:
    service = app(decode_seconds=0.3)
    answer = await service.classify(COSTLY)
    assert (answer.status, answer.code) == (422, "image_too_costly")
    assert service.metric("vit_decoder_restarts_total") == 2
    assert service.metric("vit_rejected_total", reason="image_too_costly") == 1
    webp = io.BytesIO()
    noise(64, 48).save(webp, "WEBP")
    answer = await service.classify(webp.getvalue())
    assert answer.status == 200
    assert answer.json["timings_ms"]["decode"] > 0
    query = "view=photo&size=300&caption=false"
    photo = await service.request("POST", "/attention", query=query, **form(webp.getvalue()))
    assert (photo.status, Image.open(io.BytesIO(photo.content)).size) == (200, (300, 225))


@on_a_loop
async def test_waiters_of_a_template_that_dies_at_its_start_are_answered_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picture = encode(scene(40, 30), "WEBP")
    async with pool() as decoders:
        start, starts = decoders._start_template, list[int]()

        async def dies_first() -> socket.socket:
            starts.append(1)
            if len(starts) == 1:
                await asyncio.sleep(0)
                raise OSError("the process ended at its start")
            return await start()

        monkeypatch.setattr(decoders, "_start_template", dies_first)
        answers = await asyncio.gather(*(decoders.decode(picture) for _ in range(4)))
    assert len(answers) == 4
    assert len(starts) == 2


@on_a_loop
async def test_a_frozen_template_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool() as decoders:
        await decoders.decode(encode(scene(40, 30), "WEBP"))
        frozen = decoders.template
        for pid in decoders.processes:
            os.kill(pid, signal.SIGKILL)
        os.kill(frozen, signal.SIGSTOP)
        monkeypatch.setattr(module, "_HELLO_SECONDS", 0.2)
        decoding = asyncio.create_task(decoders.decode(encode(scene(40, 30), "WEBP")))
        await until(lambda: frozen not in templates())
        monkeypatch.setattr(module, "_HELLO_SECONDS", PATIENCE)  # the next may take longer on a busy machine
        assert (await decoding).shape[2] == 3
        assert decoders.template != frozen


def test_a_service_that_gave_a_job_up_before_the_signal_was_asked_for_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        assert not _is_closed(ours)
        theirs.sendall(b"more")
        assert not _is_closed(ours)
        ours.recv(4)
        theirs.close()
        assert _is_closed(ours)


def test_a_png_with_a_second_header_is_refused_and_one_with_a_late_header_is_not_bounded() -> None:
    small, large = black_png(1, 1), black_png(400, 400)
    header = slice(8, 33)
    with pytest.raises(InvalidImage, match="its header is not its first chunk"):
        unpack(small[:33] + large[header] + large[33:], bounded=True)
    late = png_chunk(b"PLTE", bytes(3))
    with pytest.raises((InvalidImage, UnboundedWork)):
        unpack(small[:8] + late + small[8:], bounded=True)
