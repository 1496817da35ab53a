"""The service's view of shrunk pictures; its answers refer to the original pictures."""

import asyncio
import inspect
import io
import sys
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image, ImageFilter

from model.config import PreprocessConfig
from model.images.preprocess import model_input
from tests.model.images.pictures import encode
from tests.vitserve.answers import CAT, MAP, MODEL, PNG, SIDE, URL
from vitserve.client import AsyncClient, Client, Retries
from vitserve.shrinking import shrink

PREPROCESS = PreprocessConfig(
    size=(56, 56),
    resize="shortest_edge",
    resize_size=(SIDE, SIDE),
    interpolation="bicubic",
    mean=(0.5,) * 3,
    std=(1,) * 3,
)


def photo(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return smooth noise whose parts all differ."""
    noise = np.random.default_rng(0).integers(
        0, 256, (height // 64, width // 64, len(mode)), dtype=np.uint8
    )
    return Image.fromarray(noise.squeeze()).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    return encode(image, form, **({"quality": 95} | options))


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_shrunk_picture_has_the_same_region(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x8825] = {1: "N"}  # where the box was cut
    original = encoded(photo(1104, 804), form, exif=exif)
    sent = shrink(original, SIDE)
    assert len(sent.data) < len(original) / 2
    small = opened(sent.data)
    assert (small.format, small.size) == (form, (276, 201) if orientation <= 4 else (201, 276))
    assert not small.getexif()
    expected = model_input(original, PREPROCESS)
    found = model_input(sent.data, PREPROCESS)
    difference = np.abs(expected.pixels.astype(int) - found.pixels)
    assert (difference.mean() < 1) and (difference.max() < 16)
    region = np.array(found.region) * (sent.pixel * 2)
    np.testing.assert_allclose(region, expected.region, atol=4)  # one pixel of the sent picture


@pytest.mark.parametrize("size", [(256, 256), (511, 1200), (512, 700), (1023, 1023), (2050, 2048)])
def test_sides_keep_twice_the_input_size(
    size: tuple[int, int],
) -> None:
    for form in ("JPEG", "PNG"):
        data = encoded(photo(*size), form)
        sent = opened(shrink(data, SIDE).data)
        assert min(sent.size) >= 2 * SIDE
        scale = min(8, 2 ** int(np.log2(min(size) / (2 * SIDE))))
        assert sent.size == tuple(-(-each // scale) for each in size)


def test_transparent_colours_are_dropped() -> None:
    picture = photo(600, 400, "RGBA")
    sent = opened(shrink(encoded(picture, "PNG"), SIDE).data)
    assert (sent.format, sent.mode) == ("PNG", "RGB")
    np.testing.assert_array_equal(np.asarray(sent), np.asarray(picture.convert("RGB").reduce(2)))


def test_only_exif_turns_a_picture() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="6"/>'
    sent = opened(shrink(encoded(photo(1200, 800), xmp=xmp), SIDE).data)
    assert sent.size == (300, 200)


@pytest.mark.parametrize(
    "data",
    [
        encoded(photo(255, 900)),
        encoded(photo(600, 400))[:-2000],
        encoded(photo(600, 400), "PNG")[:-2000],
        encoded(photo(600, 400), "WEBP"),
        encoded(Image.fromarray(np.arange(600 * 400, dtype=np.uint16).reshape(400, 600)), "PNG"),
        encoded(photo(600, 400).filter(ImageFilter.GaussianBlur(9)), quality=1),
        b"no picture",
    ],
    ids=["small", "cut JPEG", "cut PNG", "WebP", "16 bits", "no bytes to gain", "no picture"],
)
def test_other_files_are_sent_unchanged(data: bytes) -> None:
    assert shrink(data, SIDE) == (data, (1, 1))


def test_without_pillow_originals_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(photo(1200, 800))
    assert shrink(data, SIDE) != (data, (1, 1))
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert shrink(data, SIDE) == (data, (1, 1))


REGION = {"x": 10.0, "y": 20.0, "width": 100.0, "height": 50.0}
TIMES_4 = {name: 4 * value for name, value in REGION.items()}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_regions_refer_to_the_originals(
    kind: type[Client | AsyncClient],
) -> None:
    now = 0.0
    asked = list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = request.content
        asked.append(f"{path} {opened(body).width}" if body.startswith(b"\xff\xd8") else path)
        found = MAP | {"region": REGION}
        classification = {"id": "kept", **CAT, "attention": found}
        answers = {
            "/model": MODEL,
            "/classify/batch": {"results": [classification] * 2},
            "/attention": [found],
        }
        if request.url.params.get("format") == "png":
            return httpx.Response(200, content=PNG)
        return httpx.Response(200, json=answers.get(path, classification))

    async def ask(method: str, *arguments: Any, **options: Any) -> Any:
        result = getattr(client, method)(*arguments, **options)
        return await result if inspect.isawaitable(result) else result

    whole = encoded(photo(1200, 800))
    small = encoded(photo(300, 200))

    async def talk() -> None:
        nonlocal now
        classified = await ask("classify", whole, attention=True)
        assert classified.attention.region.model_dump() == TIMES_4
        for source in (whole, classified):
            [found] = await ask("attention", source)
            assert found.region.model_dump() == TIMES_4
        batch = await ask("classify_batch", [whole, small], attention=True)
        assert [each.attention.region.model_dump() for each in batch.results] == [TIMES_4, REGION]
        await ask("heat_map", whole)
        now += 61  # another model may be served
        await ask("classify", whole)

    retries = Retries(clock=lambda: now)
    client = kind(URL, shrink=True, retries=retries, transport=httpx.MockTransport(answer))
    asyncio.run(talk())
    assert asked == [
        *("/model", "/classify 300", "/attention 300", "/attention"),
        *("/classify/batch", "/attention 1200", "/model", "/classify 300"),
    ]
