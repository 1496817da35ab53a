"""The makers write what they say, the same again for a seed; what costs too much is a fault and kept."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from random import Random

import pytest
from PIL import Image, features

from benchmarks.process_tree import ProcessTree
from tests.fuzz import costs, structures
from tests.fuzz.structures import MAKERS
from tests.launcher import ServerProcess

MAGICS = {
    "jpeg": b"\xff\xd8\xff",
    "png": b"\x89PNG\r\n\x1a\n",
    "tiff": b"II*\0",
    "avif": b"\0\0\0\x1cftypavif",
    "webp": b"RIFF",
    "gif": b"GIF89a",
    "bmp": b"BM",
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_maker_makes_small_files_of_its_format_the_same_again_for_a_seed(name: str) -> None:
    made = [MAKERS[name](Random(f"{name} {seed}")) for seed in range(3)]
    assert made == [MAKERS[name](Random(f"{name} {seed}")) for seed in range(3)]
    assert len(set(made)) > 1 or name == "webp groups"  # which has three sizes
    assert all(data.startswith(MAGICS[name.partition(" ")[0]]) for data in made)
    assert max(map(len, made)) < 20 << 20, "the service would not read it"


def opened(data: bytes, *, load: bool = True) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(io.BytesIO(data))
        if load:
            image.load()
    return image


class Small(Random):
    """Draws the smallest of what is drawn by its logarithm, so that a decoder has it in no time."""

    def uniform(self, a: float, b: float) -> float:
        return a

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return start if stop is not None else 0


@pytest.mark.parametrize("kind", [0xC9, 0xCA, 0xC0, 0xC2])
@pytest.mark.parametrize("category", [0, 5, 10])
def test_a_decoder_reads_our_frames_to_their_end(kind: int, category: int) -> None:
    arithmetic = kind in (0xC9, 0xCA)
    progressive = kind in (0xC2, 0xCA)
    data = structures._unchanging(category, not progressive) if arithmetic else bytes(4)
    scan = structures._scan([1], 1 if progressive else 0, 63)
    image = opened(structures._jpeg(kind, (40, 24), [0x11], [(scan, data)]))
    assert image.size == (40, 24)
    assert bool(image.info.get("progressive")) == progressive
    if arithmetic and category:
        # All coefficients of a block have the magnitude that was asked for.
        assert len(set(image.tobytes())) > 10


def test_the_arithmetic_coder_writes_what_a_decoder_reads_as_the_same_for_every_block() -> None:
    data = structures._unchanging(3, True)
    assert 100 < len(data) < 5000
    image = opened(structures._jpeg(0xC9, (800, 80), [0x11], [(structures._scan([1]), data)]))
    blocks = {image.crop((8 * x, 8 * y, 8 * x + 8, 8 * y + 8)).tobytes() for x in range(50, 100) for y in range(5, 10)}
    assert len(blocks) == 1, "zeros past the end of the data repeat the block"


def test_profiles_inflate_to_a_megabyte_each() -> None:
    data = MAKERS["png profiles"](Small(1))
    at = data.index(b"Raw profile type exif\0\0") + 23
    assert len(zlib.decompressobj().decompress(data[at:])) == 1 << 20
    assert data.count(b"zTXt") == 100


@pytest.mark.parametrize("name", ["tiff tiles", "tiff strips"])
def test_libtiff_reads_our_tiles_and_strips(name: str) -> None:
    image = opened(MAKERS[name](Small(2)))
    assert not any(image.tobytes())


@pytest.mark.skipif(not features.check("avif"), reason="Pillow without AVIF")
@pytest.mark.parametrize("full_colour", [True, False])
@pytest.mark.parametrize("size", [(64, 64), (5000, 200), (300, 4700)])
def test_our_av1_frames_decode_and_may_lie_about_their_size(full_colour: bool, size: tuple[int, int]) -> None:
    picture = structures.av1(size, full_colour=full_colour, tile=bytes(3000))
    assert opened(structures._avif(picture, size, full_colour=full_colour)).size == size
    assert opened(structures._avif(picture, (64, 64), full_colour=full_colour)).size == (64, 64)


@pytest.mark.skipif(not features.check("webp"), reason="Pillow without WebP")
def test_our_groups_of_huffman_codes_decode() -> None:
    assert opened(MAKERS["webp groups"](Small(3))).size in {(256, 256), (512, 512), (1024, 1024)}


def test_our_gif_holds_every_pixel() -> None:
    image = opened(MAKERS["gif frames"](Small(4)))
    assert image.size[0] * image.size[1] > 90_000


def test_rows_of_every_depth_are_a_png() -> None:
    for seed in range(12):
        opened(MAKERS["png rows"](Random(seed)), load=False).verify()


def test_files_come_after_the_samples_and_again_with_their_seed(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no picture")
    (tmp_path / "own.jpg").write_bytes(b"sample")
    first = list(itertools.islice(costs.files(5, tmp_path), len(MAKERS) + 1))
    assert first[0] == ("own.jpg", b"sample")
    assert [name for name, _ in first[1:]] == list(MAKERS)
    assert first[1:] == list(itertools.islice(costs.files(5, tmp_path / "none"), len(MAKERS)))


def test_declared_pixels_are_those_of_the_header() -> None:
    assert costs.declared_pixels(MAKERS["bmp runs"](Small(1))) > 90_000
    assert costs.declared_pixels(b"no picture") == 0


@pytest.mark.timeout(150)  # a server starts
def test_a_file_that_costs_too_much_is_a_fault_and_kept_and_the_others_are_none(tmp_path: Path) -> None:
    samples, out = tmp_path / "samples", tmp_path / "out"
    samples.mkdir()
    out.mkdir()
    (samples / "small.png").write_bytes(structures._png((8, 8), b""))
    (samples / "large.png").write_bytes(structures._png((4000, 3000), b"", row=4))
    started: list[ServerProcess] = []

    def start() -> ServerProcess:
        started.append(ServerProcess(tmp_path / "log"))
        return started[-1]

    tally = costs.send(start, 1, samples, out, cases=2, max_seconds=0.12)
    assert tally.sent == tally.statuses[200] == 2
    assert [path.name for path in out.iterdir()] == ["structures-1-0-large.png"]
    assert tally.faults[0] == "structures beyond 0.12 CPU-s or their memory: large.png 1 of 1"
    assert "(large.png)" in tally.faults[1]
    assert "answered 200, 12.0 Mpx: " in tally.faults[1]
    assert tally.seconds > 0.12
    assert tally.peak > 12 << 20
    assert [server.process.poll() is not None for server in started] == [True]


def test_a_process_that_ends_while_it_is_looked_at_has_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(path: object) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr("os.scandir", ends)
    monkeypatch.setattr("os.listdir", ends)
    assert ProcessTree(os.getpid()).pids() == [os.getpid()]


def test_the_processor_time_of_children_that_nobody_waited_for_counts() -> None:
    program = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
sys.stdin.readline()
if os.fork() == 0:
    end = time.process_time() + 0.5
    block = bytearray(64 << 20)
    while time.process_time() < end:
        pass
    os._exit(0)
sys.stdout.write("started\\n")
sys.stdout.flush()
sys.stdin.readline()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin
        assert process.stdout
        tree = ProcessTree(process.pid)
        before = tree.processor_seconds()
        with tree.growth() as growth:
            process.stdin.write("\n")
            process.stdout.readline()
            while len(tree.pids()) == 2:
                pass
        assert 0.4 < tree.processor_seconds() - before < 0.7
        assert growth.bytes > 60 << 20
        process.stdin.write("\n")
