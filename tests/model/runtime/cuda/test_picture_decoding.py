"""JPEGs that the device decodes: its pixels beside those of the CPU's way, and what becomes of failures."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from model.config import PreprocessConfig
from model.errors import DeviceError
from model.images.device_jpeg import device_picture
from model.images.preprocess import preprocess
from model.prediction import EncodedPicture, MapRequest, Picture
from model.runtime.batches import BatchRequest
from model.runtime.cuda import picture_decoding
from model.runtime.cuda.batch_launcher import BatchLauncher
from model.runtime.cuda.picture_decoding import DevicePreprocess
from model.runtime.predictor import Predictor
from tests.model.runtime.cuda.decoder_stand_in import PillowDecoder
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.cuda.fake_cuda import CUDA, captured, fake_cuda, require_fake_cuda
from tests.model.runtime.predictions import predict
from tests.model.runtime.test_predictor import make_checkpoint, make_images


def photograph(size: tuple[int, int], orientation: int = 1, seed: int = 5) -> bytes:
    """A JPEG with areas, edges and noise."""
    chance = np.random.default_rng(seed)
    coarse = Image.fromarray(chance.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize(size, Image.Resampling.BOX)
    noise = chance.integers(-20, 20, (*size[::-1], 3))
    pixels = np.clip(np.asarray(coarse, np.int16) + noise, 0, 255).astype(np.uint8)
    exif = Image.Exif()
    exif[274] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95, exif=exif)
    return file.getvalue()


def config(**changes: Any) -> PreprocessConfig:
    values = {
        "size": (32, 48),
        "resize": "shortest_edge",
        "resize_size": (40, 56),
        "interpolation": "bicubic",
        "mean": (0.4, 0.5, 0.6),
        "std": (0.2, 0.2, 0.2),
    }
    return PreprocessConfig(**(values | changes))


def encoded(data: bytes, wanted: PreprocessConfig) -> EncodedPicture:
    found = device_picture(data, wanted, max_pixels=64_000_000)
    assert found is not None
    return found.encoded


def filled(
    wanted: PreprocessConfig, files: list[bytes], decoder: PillowDecoder | None = None
) -> tuple[NDArray[np.uint8], set[int]]:
    out = torch.full((len(files), *wanted.size, 3), 99, dtype=torch.uint8)
    pictures = {row: encoded(file, wanted) for row, file in enumerate(files)}
    failed = DevicePreprocess(decoder or PillowDecoder(), wanted).fill(pictures, out)
    return out.numpy(), failed


@pytest.mark.parametrize(
    "wanted",
    [
        config(),
        config(interpolation="bilinear"),
        config(resize="squash"),
        config(resize="border", resize_size=(32, 48)),
        config(size=(33, 47), crop_rounding="down"),
        config(size=(160, 170), resize_size=(200, 200)),
    ],
    ids=["bicubic", "bilinear", "squash", "border", "odd", "enlarged"],
)
@pytest.mark.parametrize("size", [(150, 101), (64, 190)], ids=["wide", "high"])
def test_pixels_are_at_most_a_level_from_those_of_the_cpu(wanted: PreprocessConfig, size: tuple[int, int]) -> None:
    files = [photograph(size, orientation) for orientation in range(1, 9)]
    found, failed = filled(wanted, files)
    assert not failed
    for pixels, file in zip(found, files, strict=True):
        difference = np.abs(pixels.astype(int) - preprocess(file, wanted, scaled_decode=False))
        assert difference.max() <= 1
        assert difference.mean() < 0.1  # a half here may be a little less there


@pytest.mark.parametrize("wanted", [config(), config(resize="border", resize_size=(32, 48))], ids=["crop", "border"])
def test_everything_is_done_on_the_device_without_waiting_for_it(wanted: PreprocessConfig) -> None:
    require_fake_cuda()
    picture = encoded(photograph((150, 101), 6), wanted)
    with fake_cuda():
        decoded = torch.empty((101, 150, 3), dtype=torch.uint8, device=CUDA)
        out = torch.empty((1, *wanted.size, 3), dtype=torch.uint8, device=CUDA)
        subject = DevicePreprocess(SimpleNamespace(name="", decode=lambda files: [decoded]), wanted)
        with captured(torch.float32):
            assert subject.fill({0: picture}, out) == set()


def test_a_picture_that_fails_fails_alone() -> None:
    files = [photograph((100, 80), seed=seed) for seed in range(3)]
    decoder = PillowDecoder()
    decoder.undecodable.add(encoded(files[1], config()).data)
    found, failed = filled(config(), files, decoder)
    assert failed == {1}
    assert len(decoder.batches) == 1
    for row in (0, 2):
        assert np.abs(found[row].astype(int) - preprocess(files[row], config())).max() <= 1
    assert (found[1] == 99).all()


def test_a_decoder_that_raises_fails_those_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = PillowDecoder()
    for error in (RuntimeError("nvJPEG: out of memory"), ValueError("a parameter"), MemoryError()):
        decoder.error = error
        assert filled(config(), [photograph((100, 80))] * 2, decoder)[1] == {0, 1}

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("torch.nn.functional.interpolate", refuse)
    assert filled(config(), [photograph((100, 80))])[1] == {0}


def test_another_size_than_the_files_head_says_is_a_failure() -> None:
    picture = encoded(photograph((100, 80)), config())
    wrong = EncodedPicture(picture.data, (80, 100), 1)
    out = torch.zeros((1, *config().size, 3), dtype=torch.uint8)
    assert DevicePreprocess(PillowDecoder(), config()).fill({0: wrong}, out) == {0}


def test_few_pixels_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = PillowDecoder()
    monkeypatch.setattr(picture_decoding, "_PIXELS_AT_ONCE", 2 * 100 * 80)
    _, failed = filled(config(), [photograph((100, 80), seed=seed) for seed in range(5)], decoder)
    assert not failed
    assert [len(batch) for batch in decoder.batches] == [2, 2, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"interpolation": "lanczos"}, "it resizes bilinear and bicubic, and this checkpoint wants lanczos"),
        ({"mean": (0.5,), "std": (0.5,)}, "it makes pictures of three channels, and this checkpoint takes one"),
    ],
)
def test_what_the_device_does_not_do_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DeviceError, match=f"decode 'device': {reason}"):
        DevicePreprocess(PillowDecoder(), config(**changes))


def test_a_predictor_answers_encoded_pictures_as_their_pixels_beside_plain_ones() -> None:
    checkpoint, decoder = make_checkpoint(), PillowDecoder()
    subject = Predictor(
        checkpoint,
        device="cpu",
        backend="torch",
        compile_mode="off",
        max_batch=8,
        ops=StandInOps(),
        decoder=lambda _: decoder,
    )
    plain = make_images(2)
    files = [encoded(photograph((60, 50), seed=seed), checkpoint.preprocess) for seed in range(3)]
    decoder.undecodable.add(files[1].data)
    maps = [MapRequest.row(1), MapRequest("gae"), MapRequest("gae"), MapRequest.row(0), None]
    batch = [files[0], plain[0], files[1], files[2], plain[1]]
    found = predict(subject, batch, top_k=2, maps=maps)
    assert set(found.decoded) == {0, 2, 3}
    assert found.decoded[2] is None
    seen = [found.decoded.get(row, image) for row, image in enumerate(batch)]
    seen[2] = plain[0]  # anything: its answer counts for nothing
    again = predict(subject, seen, top_k=2, maps=maps)
    assert not again.decoded
    for row in (0, 1, 3, 4):
        np.testing.assert_allclose(found.scores[row], again.scores[row], atol=1e-6)
        one, other = found.maps[row], again.maps[row]
        assert (one is None) == (other is None) == (row == 4)
        if one is not None and other is not None:
            np.testing.assert_allclose(one.values, other.values, atol=1e-6)


def test_the_computation_waits_for_the_decoder_and_not_for_the_pixels_way_back() -> None:
    ops, wanted = StandInOps(strict=False), config()
    subject = BatchLauncher(
        ops,
        lambda pixels, request: (pixels[:, 0, 0, :1].int(), {}),
        shape=(*wanted.size, 3),
        max_batch=2,
        slots=1,
        preprocess=DevicePreprocess(PillowDecoder(), wanted),
    )
    ops.log.clear()
    plain = np.full((*wanted.size, 3), 7, np.uint8)
    images: list[Picture] = [encoded(photograph((100, 80)), wanted), plain]
    packed, _, by_place = subject.run(images, BatchRequest(), size=2)
    decoded = by_place[0]
    assert decoded is not None
    assert packed[:, 0].tolist() == [decoded[0, 0, 0], 7]
    copies = ops.log[0][1]
    computing = ops.log[-2][1]
    assert copies != computing
    assert ops.log == [
        ("record", copies),  # the batch is there
        ("record", copies),  # its pixels are back
        (f"wait for {copies}", computing),
        ("record", computing),
        ("synchronize", computing),
        ("synchronize", copies),
    ]


def test_a_batch_of_nothing_but_failures_ends() -> None:
    checkpoint, decoder = make_checkpoint(), PillowDecoder()
    decoder.error = RuntimeError("nothing works")
    subject = Predictor(
        checkpoint, device="cpu", backend="torch", compile_mode="off", ops=StandInOps(), decoder=lambda _: decoder
    )
    file = encoded(photograph((60, 50)), checkpoint.preprocess)
    assert predict(subject, [file, file], top_k=1, maps=[None, MapRequest("gae")]).decoded == {
        0: None,
        1: None,
    }


def test_a_cpu_is_refused_and_so_are_encoded_pictures_without_a_decoder() -> None:
    with pytest.raises(DeviceError, match="decode 'device': it needs a CUDA device, not cpu"):
        Predictor(make_checkpoint(), device="cpu", decoder=PillowDecoder)
    subject = Predictor(make_checkpoint(), device="cpu", compile_mode="off", backend="torch")
    with pytest.raises(ValueError, match="1 encoded pictures: there is no decoder"):
        predict(subject, [encoded(photograph((60, 50)), config())], top_k=1)
