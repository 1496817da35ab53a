"""The real nvImageCodec, where it is installed: on the CPU everywhere, on a GPU where there is one."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from model.errors import DeviceError
from model.images.device_jpeg import device_picture
from model.images.preprocess import preprocess
from model.runtime.cuda.nvimgcodec import NvImageCodec
from model.runtime.cuda.picture_decoding import DevicePreprocess
from tests.model.runtime.cuda.test_picture_decoding import config, photograph

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def decoder(request: pytest.FixtureRequest) -> NvImageCodec:
    pytest.importorskip("nvidia.nvimgcodec")
    return NvImageCodec(torch.device(request.param))


def grey(data: bytes) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("L").save(file, "JPEG")
    return file.getvalue()


def test_its_pixels_are_close_to_pillows_and_failures_are_alone(decoder: NvImageCodec) -> None:
    assert decoder.difference < 1
    good = [photograph((100, 80), 6), grey(photograph((61, 47)))]
    first, cut, rubbish, second = decoder.decode([good[0], good[1][:500], b"rubbish", good[1]])
    assert cut is None
    assert rubbish is None
    for found, file in zip((first, second), good, strict=True):
        assert found is not None
        expected = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"), np.int16)
        assert np.abs(found.cpu().numpy() - expected).mean() < 1


def test_a_picture_goes_through_to_the_models_pixels(decoder: NvImageCodec) -> None:
    wanted = config()
    file = photograph((190, 120), 5)
    picture = device_picture(file, wanted, max_pixels=64_000_000)
    assert picture is not None
    out = torch.zeros((1, *wanted.size, 3), dtype=torch.uint8, device=decoder.device)
    assert DevicePreprocess(decoder, wanted).fill({0: picture.encoded}, out) == set()
    assert np.abs(out[0].cpu().numpy().astype(int) - preprocess(file, wanted, scaled_decode=False)).mean() < 1


def test_without_the_library_it_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvidia", None)
    with pytest.raises(DeviceError, match="decode 'device': nvImageCodec is not usable: "):
        NvImageCodec(torch.device("cpu"))


def test_decoders_that_show_an_earlier_picture_are_not_used(
    decoder: NvImageCodec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest, shown = NvImageCodec.decode, list[torch.Tensor | None]()

    def decode(self: NvImageCodec, files: list[bytes]) -> list[torch.Tensor | None]:
        shown.extend(honest(self, files))
        return shown[-2:-1] or shown  # what was decoded before

    monkeypatch.setattr(NvImageCodec, "decode", decode)
    monkeypatch.setattr(NvImageCodec, "_try", lambda _: 0.0)
    with pytest.raises(DeviceError, match="damaged picture are left unwritten, so that they show an earlier one"):
        NvImageCodec(decoder.device)
    assert "leaves parts of a damaged picture unwritten with" in caplog.text


def test_a_library_that_is_too_old_refuses_the_start(decoder: NvImageCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder._library, "__version__", "0.8.0")
    with pytest.raises(DeviceError, match=r"nvImageCodec 0\.8\.0 is too old: 0\.9 is needed"):
        NvImageCodec(decoder.device)


def test_colours_that_are_not_pillows_refuse_the_start(decoder: NvImageCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = NvImageCodec._tensor
    monkeypatch.setattr(NvImageCodec, "_tensor", lambda self, image: honest(self, image).flip(2))
    with pytest.raises(DeviceError, match=r"a photograph is \d+\.\d levels from Pillow's on average"):
        NvImageCodec(decoder.device)
    monkeypatch.setattr(NvImageCodec, "decode", lambda self, files: [None for _ in files])
    with pytest.raises(DeviceError, match="it gives nothing for a baseline JPEG; is nvJPEG installed"):
        NvImageCodec(decoder.device)
